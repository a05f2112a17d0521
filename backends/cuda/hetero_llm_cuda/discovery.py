"""NVIDIA devices of this machine, as NVML lists them: cards, or the MIG instances of a card that is divided."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_llm.plugin import Device, DeviceUsage, Discovery, Health, Problem
from hetero_llm_cuda import nvml, reading, visible
from hetero_llm_cuda.nvml import ROOT, Handle, NvmlUnusable, Session

KIND = "cuda"
SOURCE = "NVML"
_QUERY_FAILED = "HL203"
_UNUSABLE = "HL206"
_DMESG = "dmesg | grep -i -e nvrm -e xid"
_DOCTOR = "hetero-llm doctor cuda"


@dataclass(slots=True, kw_only=True)
class _Unit:
    """A card or a MIG instance of it, before it is numbered."""

    card: Handle
    number: int
    uid: str
    instance: Handle | None = None
    index: int = -1

    @property
    def own(self) -> Handle:
        return self.instance or self.card


def discover(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Discovery:
    """Return the devices CUDA_VISIBLE_DEVICES lets this process see, all without it.

    `index` is the card's number in the order of the PCI bus, also when other cards fail; MIG instances take the numbers
    no card has. A machine without NVIDIA hardware, and a container that was given none, is empty without a problem.
    """
    try:
        with nvml.opened(root) as session:
            return _Pass(session, root).run(environ.get(visible.VISIBLE_ENV))
    except NvmlUnusable as unusable:
        return _present_but_unusable(unusable, root)


def usage(devices: Sequence[Device]) -> tuple[DeviceUsage, ...]:
    """Return a reading of each device; one whose driver or UUID does not answer has nothing measured."""
    try:
        with nvml.opened() as session:
            return tuple(reading.usage(session.by_uid(d.uid), d.uid, session.library) for d in devices)
    except NvmlUnusable:
        # Discovery and doctor tell why; a reading only says that it has none.
        return tuple(DeviceUsage(uid=device.uid) for device in devices)


def driver_versions(root: Path = ROOT) -> tuple[str | None, str | None]:
    """Return the driver's version and the newest CUDA version it serves, ``("535.129.03", "12.2")``."""
    try:
        with nvml.opened(root) as session:
            driver = nvml.text(session.ask("nvmlSystemGetDriverVersion"))
            return driver, nvml.cuda_version(session.ask("nvmlSystemGetCudaDriverVersion"))
    except NvmlUnusable:
        return nvml.kernel_module_version(root), None


def _present_but_unusable(unusable: NvmlUnusable, root: Path) -> Discovery:
    nodes = nvml.device_nodes(root)
    if unusable.absent and not nodes:
        return Discovery(source=SOURCE)
    there = f"{len(nodes)} NVIDIA GPU(s) present (/dev/nvidia*)" if nodes else "an NVIDIA driver is present"
    text = f"{there}, unusable: {unusable.reason}"
    return Discovery(problems=(_problem(_UNUSABLE, text, *(unusable.next or (_DOCTOR,))),), source=SOURCE)


def _problem(code: str, text: str, *next: str) -> Problem:
    return Problem(kind=KIND, code=code, text=text, next=next)


class _Pass:
    """One look at all cards of an open session."""

    def __init__(self, session: Session, root: Path) -> None:
        self._session, self._root = session, root
        self._problems: list[Problem] = []

    def run(self, visible_value: str | None) -> Discovery:
        count = self._session.count()
        units = [unit for number in range(count) for unit in self._units(number)]
        _number(units)
        units.sort(key=lambda unit: unit.index)
        seen = self._visible(units, visible_value)
        devices = tuple(self._device(unit, seen) for unit in seen)
        self._note_nodes_not_listed(units, count)
        if self._session.shadowed:
            text = f"the old package pynvml hides {nvml.PACKAGE}, which has the same module"
            self._note(_QUERY_FAILED, text, "pip uninstall pynvml", f"pip install --force-reinstall {nvml.PACKAGE}")
        return Discovery(devices=devices, problems=tuple(self._problems), source=SOURCE)

    def _note(self, code: str, text: str, *next: str) -> None:
        self._problems.append(_problem(code, text, *next))

    # -- which devices there are ---------------------------------------------------------------------------------------

    def _units(self, number: int) -> tuple[_Unit, ...]:
        card = self._session.card(number)
        uid = nvml.text(card.get("nvmlDeviceGetUUID"))
        if uid is None:
            reason = card.failure or "it does not tell its UUID"
            self._note(_UNUSABLE, f"GPU {number} present, unusable: {reason}", _DMESG, "reset the GPU or reboot")
            return ()
        mode = card.get("nvmlDeviceGetMigMode")
        if mode is None or mode[0] != self._session.library.NVML_DEVICE_MIG_ENABLE:
            return (_Unit(card=card, number=number, uid=uid),)
        return self._instances(card, number)

    def _instances(self, card: Handle, number: int) -> tuple[_Unit, ...]:
        """Return the instances of a divided card: a slot may be empty, an instance may fail, the others stay."""
        units: list[_Unit] = []
        for slot in range(card.get("nvmlDeviceGetMaxMigDeviceCount") or 0):
            instance = self._session.handle(card.get("nvmlDeviceGetMigDeviceHandleByIndex", slot))
            uid = nvml.text(instance.get("nvmlDeviceGetUUID"))
            if uid is not None:
                units.append(_Unit(card=card, number=number, uid=uid, instance=instance))
            elif instance.device is not None:
                self._note(_UNUSABLE, f"MIG instance {slot} of GPU {number} does not tell its UUID", "nvidia-smi -L")
        if not units:
            text = f"GPU {number} is in MIG mode and offers nothing: {card.failure or 'it has no instances'}"
            self._note(_UNUSABLE, text, "nvidia-smi mig -cgi PROFILE -C", f"nvidia-smi -i {number} -mig 0")
        return tuple(units)

    def _visible(self, units: Sequence[_Unit], value: str | None) -> list[_Unit]:
        """Return what CUDA_VISIBLE_DEVICES names, and note the words that name nothing."""
        ids = visible.visible_ids(value)
        if value is None or ids is None:
            return list(units)
        strangers = [word for word in ids if not any(_is_named((word,), unit, units) for unit in units)]
        ignored = (*strangers, *visible.ignored_words(value))
        if ignored:
            text = f"{visible.VISIBLE_ENV}={value} names {', '.join(ignored)}, which is no GPU here or named twice"
            self._note(_QUERY_FAILED, text, "nvidia-smi -L", f"correct or unset {visible.VISIBLE_ENV}")
        return [unit for unit in units if _is_named(ids, unit, units)]

    def _note_nodes_not_listed(self, units: Sequence[_Unit], count: int) -> None:
        """Tell of cards that have a device node and are not listed: they fell off before NVML was opened."""
        nodes = nvml.device_nodes(self._root)
        missing = set(nodes) - {unit.card.get("nvmlDeviceGetMinorNumber") for unit in units}
        if len(nodes) > count and missing:
            names = " ".join(f"/dev/nvidia{number}" for number in sorted(missing))
            text = f"{names} present, unusable: the driver lists {count} GPU(s) without it"
            self._note(_UNUSABLE, text, _DMESG, "nvidia-smi -L")

    # -- what a device is ----------------------------------------------------------------------------------------------

    def _device(self, unit: _Unit, seen: Sequence[_Unit]) -> Device:
        memory = reading.memory(unit.own, is_instance=unit.instance is not None)
        return Device(
            kind=KIND,
            accelerator=reading.accelerator(unit.card, unit.instance),
            uid=unit.uid,
            index=unit.index,
            physical_index=unit.card.get("nvmlDeviceGetMinorNumber"),
            card=unit.number,
            memory_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes,
            numa=reading.numa_node(unit.card, self._root),
            links=self._links(unit, seen),
            unified_memory=memory.is_system,
            # Last, since every question before may be the one that shows that the device is lost.
            health=self._health(unit, memory),
        )

    def _health(self, unit: _Unit, memory: reading.Memory) -> Health:
        faults = reading.faults(unit.card, self._session.library)
        fatal = unit.own.failure or unit.card.failure or faults.fatal
        if fatal:
            self._note(_UNUSABLE, f"GPU {unit.number} ({unit.uid}) present, unusable: {fatal}", _DMESG, _DOCTOR)
            return Health.FAILED
        if faults.weak:
            text = f"GPU {unit.number} ({unit.uid}) works, but {faults.weak}"
            self._note(_QUERY_FAILED, text, f"nvidia-smi -q -i {unit.number} -d ECC,PAGE_RETIREMENT,ROW_REMAPPER")
            return Health.DEGRADED
        return Health.OK if memory.total_bytes is not None else Health.UNKNOWN

    def _links(self, unit: _Unit, seen: Sequence[_Unit]) -> dict[str, str]:
        """Return the ways to the other whole cards. MIG instances have none: CUDA gives them no peers."""
        if unit.instance is not None:
            return {}
        library = self._session.library
        peers = [peer for peer in seen if peer.instance is None and peer is not unit]
        ways = ((str(peer.index), reading.link(unit.card, peer.card, library)) for peer in peers)
        return {index: way for index, way in ways if way is not None}


def _number(units: Sequence[_Unit]) -> None:
    """Number cards as the PCI bus does, instances with what is left, so that a plain count covers the numbers."""
    taken = {unit.number for unit in units if unit.instance is None}
    free = iter(number for number in range(len(units) + max(taken, default=0) + 1) if number not in taken)
    for unit in units:
        unit.index = unit.number if unit.instance is None else next(free)


def _is_named(ids: Sequence[str], unit: _Unit, units: Sequence[_Unit]) -> bool:
    """Tell whether `ids` name a unit. The number of a divided card means its first instance, as in CUDA."""
    first = next(other for other in units if other.number == unit.number)
    return visible.names(ids, unit.number if first is unit else None, unit.uid)
