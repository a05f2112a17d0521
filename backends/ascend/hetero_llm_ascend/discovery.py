"""Ascend devices: the sources asked one after the other, and how the chips they know become devices.

DCMI, then npu-smi, then the runtime, then /dev. The first that knows a chip is used and named; why an earlier one
failed is told, because it tends to be what is wrong with the machine.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hetero_llm.plugin import Device, DeviceUsage, Discovery, Health, Problem
from hetero_llm_ascend import devnodes, isolated, npu_smi, versions, visible
from hetero_llm_ascend.chip import Chip, Failure, Reading, accelerator_name
from hetero_llm_ascend.dcmi_library import NAME as DCMI_LIBRARY
from hetero_llm_ascend.dcmi_library import PLACES as DCMI_PLACES
from hetero_llm_ascend.devnodes import ROOT

KIND = "ascend"
DEADLINE_S = 8.0
"""For all sources together; the caller gives the whole of discovery ten seconds."""

_DCMI_DEADLINE_S = 3.0
_TOOL_DEADLINE_S = 4.0
_DISCOVERY_FAILED = "HL203"
_DEVICE_UNUSABLE = "HL206"
_ENGINE_UNFIT = "HL504"


def discover(
    root: Path = ROOT, environ: Mapping[str, str] = os.environ, host: str | None = None, deadline_s: float = DEADLINE_S
) -> Discovery:
    """Return this machine's NPUs, ascending by logical number; unhealthy ones included.

    A chip the runtime does not count comes last, failed, and does not renumber the others. What a user's own
    ASCEND_RT_VISIBLE_DEVICES leaves out is left out here.
    """
    reading, failures = read_chips(root, deadline_s)
    if reading is None:
        return Discovery(problems=tuple(_unusable(failures, root)))
    devices = _devices(reading, root, host or socket.gethostname())
    problems = [_problem(text) for text in reading.faults]
    problems += [*_uncounted(reading), *_later_source(reading, failures), *_unfit_engine()]
    try:
        wanted = visible.allowed(environ)
    except ValueError as error:
        problems.append(_problem(f"{error}; no device is offered", f"unset {visible.VARIABLE}, or write it as 0,1,4"))
        return Discovery(problems=tuple(problems), source=reading.source)
    shown = tuple(device for device in devices if wanted is None or device.index in wanted)
    return Discovery(devices=shown, problems=tuple(problems), source=reading.source)


def usage(devices: Sequence[Device], root: Path = ROOT, host: str | None = None) -> tuple[DeviceUsage, ...]:
    """Return a reading per device, in the order given; what is not measured, or gone, is None."""
    reading, _ = read_chips(root, DEADLINE_S)
    chips = sorted(reading.chips, key=_order) if reading else []
    by_uid = dict(zip(_uids(chips, host or socket.gethostname()), chips, strict=True))
    return tuple(_usage(device.uid, by_uid.get(device.uid, Chip())) for device in devices)


def read_chips(root: Path, deadline_s: float) -> tuple[Reading | None, list[Failure]]:
    """Return the first reading with chips, and what the sources before it failed of. No reading: there is no chip."""
    if not is_present(root):
        return None, []
    deadline, failures = time.monotonic() + deadline_s, list[Failure]()
    nodes = devnodes.read(root)
    for source in _sources(deadline):
        reading = source()
        if reading.chips:
            return reading, failures
        if reading.failure is None and not nodes.chips:
            return None, []
        # A toolkit may be installed where there is no NPU; its complaint counts only beside real hardware.
        hinted = reading.source != "acl" or nodes.chips or devnodes.pci_addresses(root)
        if reading.failure is not None and not reading.failure.missing and hinted:
            failures.append(reading.failure)
    return (nodes if nodes.chips else None), failures


def _sources(deadline: float) -> tuple[Callable[[], Reading], ...]:
    def left(at_most_s: float) -> float:
        return max(0.2, min(at_most_s, deadline - time.monotonic()))

    return (
        lambda: isolated.read("dcmi", left(_DCMI_DEADLINE_S)),
        lambda: npu_smi.read(left(_TOOL_DEADLINE_S)),
        lambda: isolated.read("acl", left(_TOOL_DEADLINE_S)),
    )


def is_present(root: Path = ROOT) -> bool:
    """Return whether anything here hints at NPUs; without a hint no source is asked."""
    if devnodes.physical_ids(root) or devnodes.pci_addresses(root) or npu_smi.tool_path() or find_spec("acl"):
        return True
    folders = (*DCMI_PLACES, *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)))
    return any(Path(folder, DCMI_LIBRARY).exists() for folder in folders)


def _devices(reading: Reading, root: Path, host: str) -> tuple[Device, ...]:
    chips = sorted(reading.chips, key=_order)
    first_free = 1 + max((chip.logical_id for chip in chips if chip.logical_id is not None), default=-1)
    devices: list[Device] = []
    for chip, uid in zip(chips, _uids(chips, host), strict=True):
        if chip.logical_id is not None:
            devices.append(_device(chip, chip.logical_id, uid, root))
            continue
        device = _device(chip, first_free, uid, root)
        # /dev says nothing about health; any other source says that the runtime does not count this chip.
        devices.append(device if reading.source == devnodes.SOURCE else replace(device, health=Health.FAILED))
        first_free += 1
    return tuple(devices)


def _order(chip: Chip) -> tuple[bool, int, int, int]:
    return chip.logical_id is None, chip.logical_id or 0, chip.npu_id or 0, chip.physical_id or chip.chip_id


def _device(chip: Chip, index: int, uid: str, root: Path) -> Device:
    total, used = chip.memory_bytes, chip.used_bytes
    return Device(
        kind=KIND,
        accelerator=accelerator_name(chip.name, chip.npu_name),
        uid=uid,
        index=index,
        physical_index=chip.physical_id,
        card=chip.npu_id,
        memory_bytes=total,
        free_bytes=None if total is None or used is None else max(0, total - used),
        health=chip.health,
        numa=devnodes.numa_node(chip.bus_id, root),
        links=chip.links,
    )


def _uids(chips: Sequence[Chip], host: str) -> list[str]:
    """Return an identity per chip, unique: parts of one chip that was divided have its die and bus in common."""
    uids = [_uid(chip, host) for chip in chips]
    return [uid if uids.count(uid) == 1 else f"{uid}-{place}" for place, uid in enumerate(uids)]


def _uid(chip: Chip, host: str) -> str:
    """Return an identity that survives renumbering: the die's, else the place on this host's bus, else a number.

    Chips of one card may share a bus address.
    """
    if chip.die_id is not None:
        return f"npu-{chip.die_id}"
    if chip.bus_id is not None:
        return f"npu-{host}-{chip.bus_id.lower()}-{chip.chip_id}"
    if chip.physical_id is not None:
        return f"npu-{host}-davinci{chip.physical_id}"
    if chip.npu_id is not None:
        return f"npu-{host}-card{chip.npu_id}-{chip.chip_id}"
    return f"npu-{host}-logical{chip.logical_id}"


def _usage(uid: str, chip: Chip) -> DeviceUsage:
    return DeviceUsage(
        uid=uid,
        used_bytes=chip.used_bytes,
        utilization=chip.utilization,
        temperature_c=chip.temperature_c,
        power_w=chip.power_w,
    )


def _unusable(failures: Sequence[Failure], root: Path) -> Iterable[Problem]:
    """Yield why NPUs that are on the bus, or whose driver is installed, cannot be used."""
    for failure in failures:
        yield _problem(f"present, unusable: {failure.text}", *failure.next, code=_DEVICE_UNUSABLE)
    addresses = devnodes.pci_addresses(root)
    # A container sees the host's whole PCI bus; that it was given no NPU is no fault.
    if addresses and not failures and not devnodes.in_container(root):
        text = f"present, unusable: {len(addresses)} on the PCI bus ({addresses[0]} …), but the driver shows no device"
        yield _problem(text, "install the driver, or load it: lsmod | grep drv_", code=_DEVICE_UNUSABLE)


def _later_source(reading: Reading, failures: Sequence[Failure]) -> Iterable[Problem]:
    """Yield why the devices come from a later source than the best, which may say less about them."""
    if reading.source != devnodes.SOURCE:
        for failure in failures:
            yield _problem(f"{failure.text}; the devices were read from {reading.source}", *failure.next)
        return
    why = (
        "; ".join(failure.text for failure in failures) or "no driver library, no npu-smi and no CANN toolkit are here"
    )
    text = f"present, unusable: {len(reading.chips)} device nodes, but nothing more can be read: {why}"
    yield _problem(text, *(step for failure in failures for step in failure.next), code=_DEVICE_UNUSABLE)


def _uncounted(reading: Reading) -> Iterable[Problem]:
    """Yield the chips that the runtime does not count, and so cannot use."""
    for chip in reading.chips if reading.source != devnodes.SOURCE else ():
        if chip.logical_id is None:
            name = accelerator_name(chip.name, chip.npu_name)
            text = f"{chip.place} ({name}, health {chip.health}) has no logical number: the runtime does not count it"
            yield _problem(text, f"npu-smi info -t health -i {chip.npu_id}", "npu-smi info -m", code=_DEVICE_UNUSABLE)


def _unfit_engine() -> Iterable[Problem]:
    """Yield why no engine can be started on the devices, however well they are."""
    mismatch = versions.plugin_mismatch() or versions.torch_mismatch()
    if mismatch:
        yield _problem(mismatch, "start the node from the vllm-ascend image of one version", code=_ENGINE_UNFIT)


def _problem(text: str, *advice: str, code: str = _DISCOVERY_FAILED) -> Problem:
    return Problem(kind=KIND, code=code, text=text, next=advice or ("hetero-llm doctor ascend",))
