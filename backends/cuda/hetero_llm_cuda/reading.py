"""What one card or MIG instance says of itself: memory, health, place and links. Unanswered is None, never a guess."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero_llm.plugin import DeviceUsage
from hetero_llm_cuda import nvml
from hetero_llm_cuda.names import accelerator_name, mig_profile
from hetero_llm_cuda.nvml import Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one device; `is_system` where it has none of its own."""

    total_bytes: int | None = None
    free_bytes: int | None = None
    is_system: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What is wrong with a card: `fatal` makes it unfit, `weak` only weakens it; None where nothing is reported."""

    fatal: str | None = None
    weak: str | None = None


def accelerator(card: Handle, instance: Handle | None = None) -> str:
    """Return the accelerator name of a card, or of an instance of it with its profile."""
    memory = card.get("nvmlDeviceGetMemoryInfo")
    name = nvml.text(card.get("nvmlDeviceGetName")) or ""
    if instance is not None:
        own = nvml.text(instance.get("nvmlDeviceGetName")) or ""
        name = own if " MIG " in own else f"{name} MIG {_profile(instance)}"
    return accelerator_name(name, memory.total if memory is not None else None)


def memory(device: Handle, *, is_instance: bool = False) -> Memory:
    """Return a device's memory. A card that refuses the question shares the system's; one that fails it has None."""
    found = device.get("nvmlDeviceGetMemoryInfo")
    if found is not None and found.total > 0:
        return Memory(total_bytes=int(found.total), free_bytes=min(int(found.free), int(found.total)))
    if found is None and not is_instance and not device.supports("nvmlDeviceGetMemoryInfo"):
        system = psutil.virtual_memory()
        return Memory(total_bytes=system.total, free_bytes=system.available, is_system=True)
    return Memory()


def faults(card: Handle, library: Any) -> Faults:
    """Return what the driver reports: memory errors and their repair, and a link fabric that is not up."""
    rows = card.get("nvmlDeviceGetRemappedRows")
    _, _, rows_pending, rows_failed = rows or (0, 0, 0, 0)
    if rows_failed:
        return Faults(fatal="its memory has a fault that could not be mapped out")
    if _fabric_is_down(card, library):
        return Faults(fatal="its NVLink fabric is not up: the fabric manager is not running or not ready")
    if rows_pending:
        return Faults(weak="memory rows wait to be mapped out at the next reset")
    if card.get("nvmlDeviceGetRetiredPagesPendingStatus") == library.NVML_FEATURE_ENABLED:
        return Faults(weak="memory pages wait to be retired at the next reboot")
    what = (library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC)
    errors = card.get("nvmlDeviceGetTotalEccErrors", *what)
    return Faults(weak=f"it had {errors} uncorrected memory errors since the driver was loaded" if errors else None)


def numa_node(card: Handle, root: Path) -> int | None:
    """Return the NUMA node the card hangs on, as the kernel tells; -1 stands for none."""
    pci = card.get("nvmlDeviceGetPciInfo")
    if pci is None:
        return None
    folder = f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"
    try:
        node = int((root / "sys/bus/pci/devices" / folder / "numa_node").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def link(card: Handle, peer: Handle, library: Any) -> str | None:
    """Return the best way between two cards: ``nvlink``, ``pcie`` (one host bridge), ``node`` (NUMA), ``sys``."""
    status = card.get("nvmlDeviceGetP2PStatus", peer.device, library.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == library.NVML_P2P_STATUS_OK:
        return "nvlink"
    level = card.get("nvmlDeviceGetTopologyCommonAncestor", peer.device)
    if level is None:
        return None
    if level >= library.NVML_TOPOLOGY_SYSTEM:
        return "sys"
    return "node" if level >= library.NVML_TOPOLOGY_NODE else "pcie"


def usage(device: Handle, uid: str, library: Any) -> DeviceUsage:
    """Return memory in use, share of time busy (0 to 1), degrees and watts."""
    used = device.get("nvmlDeviceGetMemoryInfo")
    busy = device.get("nvmlDeviceGetUtilizationRates")
    celsius = device.get("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU)
    milliwatts = device.get("nvmlDeviceGetPowerUsage")
    return DeviceUsage(
        uid=uid,
        used_bytes=int(used.used) if used is not None else None,
        utilization=busy.gpu / 100 if busy is not None else None,
        temperature_c=float(celsius) if celsius is not None else None,
        power_w=milliwatts / 1000 if milliwatts is not None else None,
    )


def _profile(instance: Handle) -> str:
    share = instance.get("nvmlDeviceGetAttributes_v2")
    if share is None:
        return "instance"
    return mig_profile(share.gpuInstanceSliceCount, share.computeInstanceSliceCount, share.memorySizeMB)


def _fabric_is_down(card: Handle, library: Any) -> bool:
    """Tell whether the card hangs on NVSwitches that are not set up; CUDA fails on it until they are."""
    structure = getattr(library, "c_nvmlGpuFabricInfo_t", None)
    if structure is None:
        return False
    info = structure()
    if card.get("nvmlDeviceGetGpuFabricInfo", ctypes.byref(info)) is None:
        return False
    return info.state in (library.NVML_GPU_FABRIC_STATE_NOT_STARTED, library.NVML_GPU_FABRIC_STATE_IN_PROGRESS)
