"""The NVIDIA backend, as the entry point `cuda` of group ``hetero_llm.backends``."""

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
from hetero_llm_cuda import checks, discovery, engine, fit, group
from hetero_llm_cuda.visible import VISIBLE_ENV


class CudaBackend(Backend):
    """NVIDIA GPUs and MIG instances, NCCL, and vLLM's CUDA build."""

    kind = discovery.KIND
    api_version = "1.0"
    native_resource = "GPU"
    visible_devices_env = VISIBLE_ENV
    other_visible_envs = engine.OTHER_VISIBLE_ENVS
    kv_block_tokens = 16

    def discover(self) -> Discovery:
        """Return this machine's GPUs, or the MIG instances of divided ones."""
        return discovery.discover()

    def usage(self, devices: Sequence[Device]) -> tuple[DeviceUsage, ...]:
        """Return memory in use, share of time busy, degrees and watts of each device."""
        return discovery.usage(devices)

    def versions(self) -> Mapping[str, str | None]:
        """Return the driver's version, the CUDA version it serves, and those of torch, vllm and this plugin."""
        driver, toolkit = discovery.driver_versions()
        software = {name: installed(name) for name in ("torch", "vllm")}
        return {"driver": driver, "toolkit": toolkit, **software, "plugin": installed("hetero-llm")}

    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return CUDA_VISIBLE_DEVICES for exactly `devices`, and the order its numbers are counted in."""
        return engine.device_env(devices)

    def group(self, spec: GroupSpec) -> GroupSetup:
        """Return the NCCL set-up of `spec`."""
        return group.group(spec)

    def engine(self, spec: EngineSpec) -> EngineLaunch:
        """Return how to start vLLM for `spec`."""
        return engine.engine(spec)

    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        """Return why the chip cannot run the model: its compute capability, and groups of MIG instances."""
        return tuple(
            Rejection(node="", kind=self.kind, accelerator=accelerator, rule=rule, reason=reason)
            for rule, reason in fit.objections(facts, accelerator, wish)
        )

    def overhead_bytes(self, facts: ModelFacts, tp: int, pp: int) -> int:
        """Return the estimate of context, NCCL, graphs and activations; see `hetero_llm_cuda.fit`."""
        return fit.overhead_bytes(facts, tp, pp)

    def doctor(self) -> tuple[Check, ...]:
        """Return the checks of this machine as an NVIDIA node."""
        return checks.doctor()


@hookimpl
def hetero_llm_backends() -> Sequence[Backend]:
    """Return the NVIDIA backend."""
    return (CudaBackend(),)
