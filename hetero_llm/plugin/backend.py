"""The one class a vendor writes: everything the core needs to know about a kind of accelerator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetero_llm.model import Device, ModelFacts, PoolWish, Problem, Rejection
from hetero_llm.plugin.engine import EngineLaunch, EngineSpec
from hetero_llm.plugin.group import GroupSetup, GroupSpec

API_VERSION = "1.0"
"""Version of this package's interface. Same major: compatible. A plugin states the one it was written for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """What `Backend.discover` found.

    Attributes:
        devices: ascending by `index`; unhealthy ones included.
        problems: one per thing that hides or weakens a device.
        source: where the facts come from, ``/proc``, ``nvml``, ``npu-smi``.
    """

    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUsage:
    """A cheap reading of one device. None is *not measured*."""

    uid: str
    used_bytes: int | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one doctor check.

    Attributes:
        name: short and stable, ``cpu.shm``.
        ok: True passed, False failed, None could not be decided here.
        text: what was seen, with numbers.
        next: how to mend it; empty when `ok`.
    """

    name: str
    ok: bool | None
    text: str
    next: tuple[str, ...] = field(default=())


class Backend(ABC):
    """One kind of accelerator. Importing the module that defines it must load no vendor library.

    Class attributes:
        kind: short name, ``[a-z][a-z0-9]*``.
        api_version: the `API_VERSION` the plugin was written for.
        native_resource: Ray resource that hands out device ids (``GPU``, ``NPU``); None means devices are leased.
        visible_devices_env: variable the vendor's runtime reads; None when the kind has none.
        other_visible_envs: variables of other vendors that must be cleared for this kind's processes.
        kv_block_tokens: tokens per KV-cache block of this kind's engine; the cache is a whole number of blocks.
        kv_default_bytes: KV cache per device when nobody asked for a size; None takes all memory that is left. Set
            it where the memory is also the system's.
        forms_groups: the ranks of a group meet over a collective library. False where one process stands for all of
            them: there is no pre-flight then.
        spans_nodes: an engine can stretch over several nodes.
        stands_in: `stand_in` returns an engine; only a simulation does.
    """

    kind: str
    api_version: str
    native_resource: str | None = None
    visible_devices_env: str | None = None
    other_visible_envs: tuple[str, ...] = ()
    kv_block_tokens: int = 16
    kv_default_bytes: int | None = None
    forms_groups: bool = True
    spans_nodes: bool = True
    stands_in: bool = False

    @abstractmethod
    def discover(self) -> Discovery:
        """Return this machine's devices. Runs in a subprocess with a deadline; may load vendor libraries there.

        One faulty device becomes `Health.FAILED` or a problem; it neither hides nor renumbers the others. No
        hardware of this kind is an empty `Discovery`, not a problem.
        """

    @abstractmethod
    def versions(self) -> Mapping[str, str | None]:
        """Return the versions of driver, toolkit, torch, vllm and plugin without importing them; None if unknown."""

    def usage(self, devices: Sequence[Device]) -> tuple[DeviceUsage, ...]:
        """Return a cheap reading per device, in the order given. Default: nothing is measured."""
        return tuple(DeviceUsage(uid=device.uid) for device in devices)

    @abstractmethod
    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        """Return the variables that make exactly `devices` visible to one process."""

    @abstractmethod
    def group(self, spec: GroupSpec) -> GroupSetup:
        """Return how the ranks of `spec` form their process group."""

    @abstractmethod
    def engine(self, spec: EngineSpec) -> EngineLaunch:
        """Return the command that serves `spec`, and how to read its log."""

    def stand_in(self, launch: EngineLaunch, spec: EngineSpec) -> EngineLaunch | None:
        """Return how to start this backend's engine in the place of another kind's, on simulated devices.

        Args:
            launch: what the other kind's `engine` returned; its flags and environment are kept as far as they go.
            spec: what that was made from.

        Returns:
            None when this backend's engine is no simulation: real engines never stand in for each other.
        """
        return None

    @abstractmethod
    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        """Return why this accelerator cannot run the model (dtype, head size, quantisation); empty if it can.

        `node` of the rejections is left empty; the planner fills it in.
        """

    def overhead_bytes(self, facts: ModelFacts, tp: int, pp: int) -> int:
        """Return memory each device needs beside weights and KV cache: runtime, activations. Default: 0."""
        return 0

    def doctor(self) -> tuple[Check, ...]:
        """Return this machine's checks for the kind. Runs in a subprocess with a deadline. Default: none."""
        return ()
