"""How to read the simulated engine's log: phases, numbers, causes of failure."""

from __future__ import annotations

import re

from hetero_llm.plugin import EngineFact, PhaseMarker, RootCausePattern

PHASES = (
    PhaseMarker(pattern=re.compile(r"simulated \S+, tp="), phase="reading the profile"),
    PhaseMarker(pattern=re.compile(r"Loading weights"), phase="loading weights"),
    PhaseMarker(pattern=re.compile(r"Application startup complete"), phase="generating the first token"),
)

FACTS = (EngineFact(pattern=re.compile(r"KV cache size: ([\d,]+) tokens"), name="kv_tokens"),)

ROOT_CAUSES = (
    RootCausePattern(
        pattern=re.compile(r"ProfileInvalid: (.+)"),
        message="the simulated accelerator cannot be had: {1}",
        next=("add the profile to a file and name it in HETERO_LLM_SIM_PROFILES",),
    ),
    RootCausePattern(
        pattern=re.compile(r"FaultsInvalid: (.+)"),
        message="the faults to simulate cannot be read: {1}",
        next=("correct HETERO_LLM_SIM_FAULTS",),
    ),
    RootCausePattern(
        pattern=re.compile(r"ContextTooLong: one request of (\d+) tokens does not fit the KV cache of (\d+) tokens"),
        message="one request of {1} tokens does not fit the KV cache of {2} tokens",
        next=("give --max-model-len {2} or less",),
    ),
    RootCausePattern(
        pattern=re.compile(r"OSError: .*address already in use"),
        message="the engine's port belongs to another process",
        next=("start it again; a free port is chosen each time",),
    ),
    RootCausePattern(
        pattern=re.compile(r"error: argument (\S+): (.+)"),
        message="the engine refuses the value of {1}: {2}",
        next=("correct the value, or leave the flag out",),
    ),
)
"""From most to least specific, for `hetero_llm.plugin.rootcause.find_root_cause`."""
