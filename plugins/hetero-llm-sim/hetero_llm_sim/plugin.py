"""The simulated backend, as the entry point `sim` of group ``hetero_llm.backends``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from hetero_llm.plugin import (
    Backend,
    Check,
    Device,
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
from hetero_llm_sim import checks, discovery, engine, group
from hetero_llm_sim.profile import ProfileInvalid, load_profiles

DISTRIBUTION = "hetero-llm-sim"


class SimBackend(Backend):
    """Accelerators from a list, and an engine that keeps their time and makes up the text."""

    kind = discovery.KIND
    api_version = "1.0"
    native_resource = None
    visible_devices_env = engine.VISIBLE_ENV
    other_visible_envs = engine.OTHER_VISIBLE_ENVS
    kv_block_tokens = 16
    forms_groups = False
    stands_in = True

    def discover(self) -> Discovery:
        """Return the devices that were listed; none without a list."""
        return discovery.discover()

    def versions(self) -> Mapping[str, str | None]:
        """Return this plugin's version; there is no driver, torch or vLLM to have one."""
        try:
            return {"plugin": metadata.version(DISTRIBUTION)}
        except metadata.PackageNotFoundError:
            return {"plugin": None}

    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return the variable that names the devices of one process."""
        return engine.device_env(devices)

    def group(self, spec: GroupSpec) -> GroupSetup:
        """Return the variables of the ranks; a simulated group needs no pre-flight."""
        return group.group(spec)

    def engine(self, spec: EngineSpec) -> EngineLaunch:
        """Return how to start the simulated engine for `spec`."""
        return engine.engine(spec)

    def stand_in(self, launch: EngineLaunch, spec: EngineSpec) -> EngineLaunch | None:
        """Return the simulated engine with the flags and the environment of another kind's."""
        return engine.stand_in(launch, spec)

    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        """Return why the engine would not start: no profile, or a context longer than the profile's KV cache.

        Any dtype, head size or quantisation will do, since no weight is ever read.
        """
        try:
            profile = load_profiles().find(accelerator)
        except ProfileInvalid as error:
            return (self._rejection(accelerator, "feature", str(error)),)
        kv_tokens = profile.of_group(wish.tp or 1, wish.pp or 1).kv_tokens
        wanted = wish.max_model_len or facts.max_model_len
        if wanted <= kv_tokens:
            return ()
        reason = f"a context of {wanted} tokens; the simulated KV cache holds {kv_tokens}"
        return (self._rejection(accelerator, "memory", reason),)

    def doctor(self) -> tuple[Check, ...]:
        """Return the checks of the lists the simulation is made from."""
        return checks.doctor()

    def _rejection(self, accelerator: str, rule: str, reason: str) -> Rejection:
        return Rejection(node="", kind=self.kind, accelerator=accelerator, rule=rule, reason=reason)


@hookimpl
def hetero_llm_backends() -> Sequence[Backend]:
    """Return the simulated backend."""
    return (SimBackend(),)
