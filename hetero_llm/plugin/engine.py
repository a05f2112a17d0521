"""What the core asks of a backend about engines: the command that starts one, and how to read its log."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.model import Device

SHM_PREFIX_ENV = "HETERO_ENGINE_SHM_PREFIX"
"""Variable every engine is started with. An entry program that makes the names of shared-memory objects in /dev/shm
contain its value lets the core remove them even after the engine was killed before anybody saw it use them. Set for
`hetero-llm serve`, it begins the value of every engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """One engine to start on devices that are already held.

    Attributes:
        model_path: folder with config.json, weights and tokenizer.
        served_name: the model name clients use.
        devices: held devices in rank order; ``len(devices) == tp * pp``.
        host: address the engine's HTTP server binds.
        port: TCP port the engine's HTTP server binds.
        max_model_len: context length in tokens.
        kv_cache_bytes: KV cache per device in bytes; None lets the engine decide.
        gpu_memory_utilization: share of device memory the engine may take, where it decides itself.
        dtype: torch dtype name, or ``auto``.
        extra_args: engine flags of the user, appended last so that they win.
        options: backend-specific settings (`engine_by_kind` in the configuration).
        node_count: nodes of the group.
        node_rank: this node's rank in the group.
        master_address: address of node rank 0.
        master_port: port of node rank 0's rendezvous; required when `node_count` > 1.
    """

    model_path: str
    served_name: str
    devices: tuple[Device, ...]
    tp: int
    pp: int
    host: str
    port: int
    max_model_len: int
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    extra_args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    node_count: int = 1
    node_rank: int = 0
    master_address: str | None = None
    master_port: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMarker:
    """A line that matches `pattern` starts the phase called `phase` (``loading weights``)."""

    pattern: re.Pattern[str]
    phase: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCausePattern:
    r"""A log line that explains a failure. Patterns are tried in order on each line; the first hit of all wins.

    Attributes:
        pattern: its groups fill `message` and `next` by `str.format` (``{0}`` is the whole match, ``{1}`` group 1).
        message: the root cause in one line.
        next: what to do.
        generic: a summary such as ``see root cause above``; kept only when nothing better is found.
    """

    pattern: re.Pattern[str]
    message: str
    next: tuple[str, ...] = ()
    generic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFact:
    """A log line that states a number: the first group, as an integer with commas removed, is stored as `name`."""

    pattern: re.Pattern[str]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """How to start one engine and how to understand it.

    Attributes:
        argv: command line, absolute program path first.
        env: variables to set.
        env_remove: variables that must not reach the engine (other vendors' visible-devices variables, a stale
            ``RANK_TABLE_FILE``).
        cores: logical CPU ids the whole process tree is pinned to; empty for no pinning.
        health_path: HTTP path that answers 200 when the server is up. Ready is decided by a generated token, not by it.
        headless: this node serves no HTTP (node rank > 0).
        phases: markers in the order they are expected.
        root_causes: patterns from most to least specific.
        facts: numbers worth keeping (``kv_tokens``).
        start_deadline_s: seconds from start to the first generated token.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    env_remove: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    health_path: str = "/health"
    headless: bool = False
    phases: tuple[PhaseMarker, ...] = ()
    root_causes: tuple[RootCausePattern, ...] = ()
    facts: tuple[EngineFact, ...] = ()
    start_deadline_s: float = 600.0
