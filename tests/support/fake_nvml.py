"""A machine's NVML as a C library would answer: put in the place of the loaded library inside the real pynvml module.

So pynvml's own wrappers, structures and exception classes run; only the driver is pretended. Each function here takes
what ctypes would pass and returns an NVML status. A function whose name is in `Gpu.errors` answers with that status.

`Library.sessions` is 0 again when everybody who opened NVML has shut it down. There is no function here that makes a
context on a device, nor one that changes any: who calls such a one gets *function not found*, and `calls` has its name.
"""

# The functions here bear the names of NVML's own.
# ruff: noqa: N802

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml

GIB = 1 << 30
SUCCESS = 0
NOT_SUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED
NO_PERMISSION = pynvml.NVML_ERROR_NO_PERMISSION
NOT_FOUND = pynvml.NVML_ERROR_NOT_FOUND
GPU_IS_LOST = pynvml.NVML_ERROR_GPU_IS_LOST
UNKNOWN = pynvml.NVML_ERROR_UNKNOWN
MISMATCH = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
LIBRARY_NOT_FOUND = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
DRIVER_NOT_LOADED = pynvml.NVML_ERROR_DRIVER_NOT_LOADED


@dataclass(kw_only=True)
class Instance:
    """One MIG instance in its slot."""

    uuid: str
    profile: str = "1g.10gb"
    memory: int = 10 * GIB
    used: int = 0
    slices: tuple[int, int] = (1, 1)
    errors: Mapping[str, int] = field(default_factory=dict)


@dataclass(kw_only=True)
class Gpu:
    """One card. `errors` maps an NVML function to the status it answers for this card; ``*`` stands for all."""

    uuid: str
    name: str | bytes = "NVIDIA H100 80GB HBM3"
    memory: int = 85_520_809_984
    used: int = 0
    minor: int | None = None
    pci: tuple[int, int, int] = (0, 0, 0)
    mig: tuple[Instance | None, ...] | None = None
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    pages_pending: int = 0
    uncorrected: int = 0
    fabric_state: int = pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    persistence: int = 1
    utilization: int = 0
    temperature: int = 35
    milliwatts: int = 70_000
    nvlinks: frozenset[int] = frozenset()
    topology: Mapping[int, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)


class Library:
    """The C functions of libnvidia-ml.so.1 that discovery may use; any other is missing, as in an old driver."""

    def __init__(
        self,
        *gpus: Gpu,
        driver: str = "550.54.15",
        cuda: int = 12040,
        init_error: int = SUCCESS,
        count_error: int = SUCCESS,
        missing: tuple[str, ...] = (),
    ) -> None:
        self.gpus = gpus
        self.sessions = 0
        self.calls: list[str] = []
        self._driver, self._cuda = driver, cuda
        self._init_error, self._count_error, self._missing = init_error, count_error, missing
        self._objects: list[Gpu | Instance] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("_"):
            raise AttributeError(name)
        self.calls.append(name)
        if name in self._missing or not hasattr(type(self), f"c_{name}"):
            raise AttributeError(name)
        return self._function(name)

    def _function(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            return int(getattr(self, f"c_{name}")(*arguments))

        return call

    # -- handles: a pointer whose address is the object's number plus one ---------------------------------------------

    def _point(self, reference: Any, target: Gpu | Instance) -> int:
        if not any(known is target for known in self._objects):
            self._objects.append(target)
        number = next(n for n, known in enumerate(self._objects) if known is target)
        address = ctypes.c_void_p(number + 1)
        ctypes.memmove(ctypes.byref(reference._obj), ctypes.byref(address), ctypes.sizeof(address))
        return SUCCESS

    def _at(self, handle: Any) -> Any:
        return self._objects[ctypes.cast(handle, ctypes.c_void_p).value - 1]

    def _answer(self, name: str, handle: Any, give: Callable[[Any], int | None]) -> int:
        """Answer for one device, unless this device fails the question; what only cards answer, instances refuse."""
        target = self._at(handle)
        error = target.errors.get(name, target.errors.get("*", SUCCESS))
        if error:
            return error
        return give(target) or SUCCESS

    def _card_only(self, name: str, handle: Any, give: Callable[[Any], int | None]) -> int:
        if isinstance(self._at(handle), Instance):
            return NOT_SUPPORTED
        return self._answer(name, handle, give)

    # -- the library itself --------------------------------------------------------------------------------------------

    def c_nvmlInitWithFlags(self, flags: int) -> int:
        if self._init_error == SUCCESS:
            self.sessions += 1
        return self._init_error

    def c_nvmlShutdown(self) -> int:
        self.sessions -= 1
        return SUCCESS

    def c_nvmlErrorString(self, status: int) -> bytes:
        raise NotImplementedError("pynvml knows all statuses used here by name")

    def c_nvmlSystemGetDriverVersion(self, buffer: Any, length: Any) -> int:
        buffer.value = self._driver.encode()
        return SUCCESS

    def c_nvmlSystemGetCudaDriverVersion(self, reference: Any) -> int:
        reference._obj.value = self._cuda
        return SUCCESS

    def c_nvmlDeviceGetCount_v2(self, reference: Any) -> int:
        reference._obj.value = len(self.gpus)
        return self._count_error

    def c_nvmlDeviceGetHandleByIndex_v2(self, index: Any, reference: Any) -> int:
        if index.value >= len(self.gpus):
            return pynvml.NVML_ERROR_INVALID_ARGUMENT
        gpu = self.gpus[index.value]
        return gpu.errors.get("nvmlDeviceGetHandleByIndex_v2", SUCCESS) or self._point(reference, gpu)

    def c_nvmlDeviceGetHandleByUUID(self, uuid: Any, reference: Any) -> int:
        units = [unit for gpu in self.gpus for unit in (gpu, *filter(None, gpu.mig or ()))]
        found = next((unit for unit in units if unit.uuid.encode() == uuid.value), None)
        return NOT_FOUND if found is None else self._point(reference, found)

    # -- cards and instances -------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetUUID(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._answer("nvmlDeviceGetUUID", handle, lambda unit: setattr(buffer, "value", unit.uuid.encode()))

    def c_nvmlDeviceGetName(self, handle: Any, buffer: Any, length: Any) -> int:
        return self._answer("nvmlDeviceGetName", handle, lambda unit: setattr(buffer, "value", self._name(unit)))

    def _name(self, unit: Gpu | Instance) -> bytes:
        if isinstance(unit, Gpu):
            return unit.name if isinstance(unit.name, bytes) else unit.name.encode()
        card = next(gpu for gpu in self.gpus if any(unit is instance for instance in gpu.mig or ()))
        return self._name(card) + f" MIG {unit.profile}".encode()

    def c_nvmlDeviceGetMemoryInfo(self, handle: Any, reference: Any) -> int:
        def fill(unit: Gpu | Instance) -> None:
            reference._obj.total, reference._obj.used = unit.memory, unit.used
            reference._obj.free = unit.memory - unit.used

        return self._answer("nvmlDeviceGetMemoryInfo", handle, fill)

    def c_nvmlDeviceGetMinorNumber(self, handle: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            number = next(n for n, known in enumerate(self.gpus) if known is gpu)
            reference._obj.value = number if gpu.minor is None else gpu.minor

        return self._card_only("nvmlDeviceGetMinorNumber", handle, fill)

    def c_nvmlDeviceGetPciInfo_v3(self, handle: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            info = reference._obj
            info.domain, info.bus, info.device = gpu.pci

        return self._card_only("nvmlDeviceGetPciInfo_v3", handle, fill)

    # -- MIG -----------------------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        def fill(gpu: Gpu) -> None:
            current._obj.value = pending._obj.value = int(gpu.mig is not None)

        return self._card_only("nvmlDeviceGetMigMode", handle, fill)

    def c_nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            reference._obj.value = 7

        return self._card_only("nvmlDeviceGetMaxMigDeviceCount", handle, fill)

    def c_nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, slot: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> int:
            slots = gpu.mig or ()
            instance = slots[slot.value] if slot.value < len(slots) else None
            return NOT_FOUND if instance is None else self._point(reference, instance)

        return self._card_only("nvmlDeviceGetMigDeviceHandleByIndex", handle, fill)

    def c_nvmlDeviceGetAttributes_v2(self, handle: Any, reference: Any) -> int:
        def fill(instance: Instance) -> None:
            share = reference._obj
            share.gpuInstanceSliceCount, share.computeInstanceSliceCount = instance.slices
            share.memorySizeMB = instance.memory >> 20

        return self._answer("nvmlDeviceGetAttributes_v2", handle, fill)

    # -- health --------------------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetRemappedRows(self, handle: Any, *references: Any) -> int:
        def fill(gpu: Gpu) -> None:
            for reference, value in zip(references, gpu.remapped, strict=True):
                reference._obj.value = value

        return self._card_only("nvmlDeviceGetRemappedRows", handle, fill)

    def c_nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            reference._obj.value = gpu.pages_pending

        return self._card_only("nvmlDeviceGetRetiredPagesPendingStatus", handle, fill)

    def c_nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            wanted = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
            # Corrected errors, and those of the card's whole life, are many and harmless.
            reference._obj.value = gpu.uncorrected if (kind.value, counter.value) == wanted else 12345

        return self._card_only("nvmlDeviceGetTotalEccErrors", handle, fill)

    def c_nvmlDeviceGetGpuFabricInfo(self, handle: Any, reference: Any) -> int:
        return self._card_only(
            "nvmlDeviceGetGpuFabricInfo", handle, lambda gpu: setattr(reference._obj, "state", gpu.fabric_state)
        )

    def c_nvmlDeviceGetPersistenceMode(self, handle: Any, reference: Any) -> int:
        return self._card_only(
            "nvmlDeviceGetPersistenceMode", handle, lambda gpu: setattr(reference._obj, "value", gpu.persistence)
        )

    # -- links ---------------------------------------------------------------------------------------------------------

    def _number(self, gpu: Gpu) -> int:
        return next(n for n, known in enumerate(self.gpus) if known is gpu)

    def c_nvmlDeviceGetP2PStatus(self, handle: Any, peer: Any, capability: int, reference: Any) -> int:
        def fill(gpu: Gpu) -> None:
            linked = capability == pynvml.NVML_P2P_CAPS_INDEX_NVLINK and self._number(self._at(peer)) in gpu.nvlinks
            reference._obj.value = pynvml.NVML_P2P_STATUS_OK if linked else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED

        return self._card_only("nvmlDeviceGetP2PStatus", handle, fill)

    def c_nvmlDeviceGetTopologyCommonAncestor(self, handle: Any, peer: Any, reference: Any) -> int:
        def fill(gpu: Gpu) -> int | None:
            level = gpu.topology.get(self._number(self._at(peer)))
            if level is None:
                return NOT_SUPPORTED
            reference._obj.value = level
            return None

        return self._card_only("nvmlDeviceGetTopologyCommonAncestor", handle, fill)

    # -- readings ------------------------------------------------------------------------------------------------------

    def c_nvmlDeviceGetUtilizationRates(self, handle: Any, reference: Any) -> int:
        return self._card_only(
            "nvmlDeviceGetUtilizationRates", handle, lambda gpu: setattr(reference._obj, "gpu", gpu.utilization)
        )

    def c_nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, reference: Any) -> int:
        return self._card_only(
            "nvmlDeviceGetTemperature", handle, lambda gpu: setattr(reference._obj, "value", gpu.temperature)
        )

    def c_nvmlDeviceGetPowerUsage(self, handle: Any, reference: Any) -> int:
        return self._card_only(
            "nvmlDeviceGetPowerUsage", handle, lambda gpu: setattr(reference._obj, "value", gpu.milliwatts)
        )


@contextmanager
def plugged_in(library: Library) -> Iterator[Library]:
    """Make pynvml talk to `library` for the time of the block, then to whatever it talked to before."""
    before, cache = pynvml.nvmlLib, dict(pynvml._nvmlGetFunctionPointer_cache)
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = library
    try:
        yield library
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml._nvmlGetFunctionPointer_cache.update(cache)


def uuid(number: int) -> str:
    """Return a UUID of a card, different for each number."""
    return f"GPU-{number:08x}-0000-4000-8000-00000000000{number % 10}"


def hgx(count: int = 8, **changes: Any) -> list[Gpu]:
    """Return `count` H100 that are all linked by NVLink, four to a NUMA node."""
    everyone = frozenset(range(count))
    level = {
        number: {peer: pynvml.NVML_TOPOLOGY_NODE if peer // 4 == number // 4 else pynvml.NVML_TOPOLOGY_SYSTEM
                 for peer in everyone - {number}}
        for number in everyone
    }  # fmt: skip
    cards = ((n, everyone - {n}) for n in range(count))
    return [Gpu(uuid=uuid(n), pci=(0, 16 + n, 0), nvlinks=peers, topology=level[n], **changes) for n, peers in cards]
