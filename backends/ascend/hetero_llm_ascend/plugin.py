"""The Ascend backend, as the entry point `ascend` of group ``hetero_llm.backends``."""

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
from hetero_llm_ascend import checks, discovery, engine, group, models, versions, visible


class AscendBackend(Backend):
    """Huawei Ascend NPUs, HCCL, and vLLM with the vllm-ascend plugin."""

    kind = discovery.KIND
    api_version = "1.0"
    native_resource = "NPU"
    visible_devices_env = visible.VARIABLE
    other_visible_envs = engine.OTHER_VISIBLE_ENVS
    kv_block_tokens = engine.BLOCK_TOKENS
    kv_default_bytes = None

    def discover(self) -> Discovery:
        """Return this machine's NPUs, one device per die."""
        return discovery.discover()

    def usage(self, devices: Sequence[Device]) -> tuple[DeviceUsage, ...]:
        """Return memory, utilisation, temperature and power per device, in the order given."""
        return discovery.usage(devices)

    def versions(self) -> Mapping[str, str | None]:
        """Return the installed versions of driver, CANN, torch, torch-npu, vllm and vllm-ascend, importing none."""
        return versions.versions()

    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return ASCEND_RT_VISIBLE_DEVICES with the devices' logical numbers, ascending."""
        return engine.device_env(devices)

    def group(self, spec: GroupSpec) -> GroupSetup:
        """Return the HCCL set-up of `spec`."""
        return group.group(spec)

    def engine(self, spec: EngineSpec) -> EngineLaunch:
        """Return how to start vLLM with vllm-ascend for `spec`.

        Raises:
            EngineUnfit: vllm-ascend and vLLM, or torch-npu and torch, are of different versions.
        """
        return engine.engine(spec)

    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        """Return why the part cannot run the model: generation, number format, quantisation, pipelines."""
        return tuple(
            Rejection(node="", kind=self.kind, accelerator=accelerator, rule=rule, reason=reason)
            for rule, reason in models.objections(facts, accelerator, wish)
        )

    def overhead_bytes(self, facts: ModelFacts, tp: int, pp: int) -> int:
        """Return what the runtime, HCCL and one step's activations take of a device. Estimated, not measured."""
        return models.overhead_bytes(facts, tp, pp)

    def doctor(self) -> tuple[Check, ...]:
        """Return the checks of this machine as an Ascend node."""
        return checks.doctor()


@hookimpl
def hetero_llm_backends() -> Sequence[Backend]:
    """Return the Ascend backend."""
    return (AscendBackend(),)
