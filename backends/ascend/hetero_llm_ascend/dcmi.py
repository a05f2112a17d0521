"""Facts from DCMI, the driver's own management library: the best source, asked first.

Version 1 of its calls, then version 2. A query that fails leaves its fact unknown; only the logical number and the
health are missed enough to be told. One faulty card never hides the others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int, c_uint
from dataclasses import dataclass, replace
from typing import TypeVar

from hetero_llm.plugin import Health
from hetero_llm_ascend import codes
from hetero_llm_ascend.chip import MIB, Chip, Failure, Reading
from hetero_llm_ascend.dcmi_library import (
    MAX_CARDS,
    ChipInfo,
    DcmiError,
    DieId,
    HbmInfo,
    LibraryNotFound,
    LibraryUnusable,
    MemoryInfo,
    PcieInfo,
    call,
    has,
    load,
)

SOURCE = "dcmi"
_NPU = 0
_VDIE = 1
_AI_CORE = 2
_HEALTH = {0: Health.OK, 1: Health.DEGRADED, 2: Health.FAILED, 3: Health.FAILED}
"""OK, general warning, important warning, emergency; 0xFFFFFFFF is a device that did not start."""

_LINKS = {1: "pcie", 2: "pcie", 3: "hccs", 4: "pcie", 5: "pcie", 6: "sio", 7: "hccs"}
"""SYS, PHB, HCCS, PXB, PIX, SIO (the dies of one card), HCCS through a switch."""

T = TypeVar("T")


def read(library: ctypes.CDLL | None = None) -> Reading:
    """Return the chips the driver knows. May hang or crash with the driver: runs in a process of its own."""
    try:
        loaded = load() if library is None else library
    except LibraryNotFound:
        return Reading(source=SOURCE, failure=Failure(text="libdcmi.so is not installed", missing=True))
    except LibraryUnusable as error:
        advice = (
            "add the driver's lib64 folders to LD_LIBRARY_PATH",
            "source /usr/local/Ascend/driver/bin/setenv.bash",
        )
        return Reading(source=SOURCE, failure=Failure(text=f"libdcmi.so cannot be loaded: {error}", next=advice))
    try:
        return _read_initialised(loaded)
    except DcmiError as error:
        if error.code == codes.NO_DEVICE:
            return Reading(source=SOURCE)
        return Reading(source=SOURCE, failure=Failure(text=str(error), next=codes.steps(error.code)))


def _read_initialised(library: ctypes.CDLL) -> Reading:
    try:
        call(library, "dcmi_init")
    except DcmiError as refused:
        if not has(library, "dcmiv2_init"):
            raise
        try:
            call(library, "dcmiv2_init")
        except DcmiError as error:
            # Whichever version this chip does not have says so; the other one says what is wrong.
            raise (refused if error.code in (codes.NOT_SUPPORTED, codes.NO_FUNCTION) else error) from error
        return _read_all(library, _v2_places(library))
    return _read_all(library, *_v1_places(library))


@dataclass(frozen=True, slots=True)
class _Place:
    """How to name one chip to the library: leading arguments of its calls, and the prefix of their names."""

    npu_id: int
    chip_id: int
    v2: bool = False

    def call(self, library: ctypes.CDLL, function: str, *arguments: object) -> None:
        where = (c_int(self.npu_id),) if self.v2 else (c_int(self.npu_id), c_int(self.chip_id))
        call(library, f"{'dcmiv2' if self.v2 else 'dcmi'}_{function}", *where, *arguments)


def _v1_places(library: ctypes.CDLL) -> tuple[list[_Place], list[str]]:
    count, cards = c_int(), (c_int * MAX_CARDS)()
    call(library, "dcmi_get_card_list", byref(count), cards, c_int(MAX_CARDS))
    places: list[_Place] = []
    faults: list[str] = []
    for card in cards[: count.value]:
        chips = c_int()
        try:
            call(library, "dcmi_get_device_num_in_card", c_int(card), byref(chips))
        except DcmiError as error:
            faults.append(f"NPU {card} does not say which chips it has: {error}")
            continue
        places += [place for chip in range(chips.value) if _is_npu(library, place := _Place(card, chip))]
    return places, faults


def _v2_places(library: ctypes.CDLL) -> list[_Place]:
    count, devices = c_int(), (c_int * MAX_CARDS)()
    call(library, "dcmiv2_get_device_list", devices, byref(count), c_int(MAX_CARDS))
    places = [_Place(device, 0, v2=True) for device in devices[: count.value]]
    return [place for place in places if _is_npu(library, place)]


def _is_npu(library: ctypes.CDLL, place: _Place) -> bool:
    """Return whether this is no controller (MCU, CPU); what does not say is kept."""
    kind = c_int(_NPU)
    _optional(lambda: place.call(library, "get_device_type", byref(kind)))
    return kind.value == _NPU


def _read_all(library: ctypes.CDLL, places: list[_Place], faults: list[str] | None = None) -> Reading:
    chips: list[Chip] = []
    found = list(faults or ())
    for place in places:
        chip, complaints = _chip(library, place)
        chips.append(chip)
        if complaints:
            found.append(f"{chip.place}: {'; '.join(complaints)}")
    return Reading(source=SOURCE, chips=_linked(library, places, chips), faults=tuple(found))


def _chip(library: ctypes.CDLL, place: _Place) -> tuple[Chip, list[str]]:
    complaints: list[str] = []
    logical_id = _needed(lambda: _logical_id(library, place), complaints)
    health = _needed(lambda: _unsigned(library, place, "get_device_health"), complaints)
    memory = _memory(library, place)
    name, npu_name = _optional(lambda: _names(library, place)) or ("", "")
    power = _optional(lambda: _signed(library, place, "get_device_power_info"))
    temperature = _optional(lambda: _signed(library, place, "get_device_temperature"))
    chip = Chip(
        npu_id=place.npu_id,
        chip_id=place.chip_id,
        logical_id=logical_id,
        physical_id=_optional(lambda: _physical_id(library, place, logical_id)),
        name=name,
        npu_name=npu_name,
        health=_HEALTH.get(-1 if health is None else health, Health.UNKNOWN),
        memory_bytes=memory[0] if memory else None,
        used_bytes=memory[1] if memory else None,
        bus_id=_optional(lambda: _bus_id(library, place)),
        die_id=_optional(lambda: _die_id(library, place)),
        utilization=_optional(lambda: _utilization(library, place)),
        temperature_c=float(temperature) if temperature is not None else None,
        # In tenths of a watt; the second die of a card has no meter and says 0.
        power_w=power / 10 if power else None,
    )
    return chip, complaints


def _optional(query: Callable[[], T]) -> T | None:
    try:
        return query()
    except DcmiError:
        return None


def _needed(query: Callable[[], T], complaints: list[str]) -> T | None:
    try:
        return query()
    except DcmiError as error:
        complaints.append(str(error))
        return None


def _signed(library: ctypes.CDLL, place: _Place, function: str) -> int:
    value = c_int()
    place.call(library, function, byref(value))
    return value.value


def _unsigned(library: ctypes.CDLL, place: _Place, function: str) -> int:
    value = c_uint()
    place.call(library, function, byref(value))
    return value.value


def _logical_id(library: ctypes.CDLL, place: _Place) -> int:
    if place.v2:
        return place.npu_id
    value = c_int()
    # The one call of version 1 that has its result in front.
    call(library, "dcmi_get_device_logic_id", byref(value), c_int(place.npu_id), c_int(place.chip_id))
    return value.value


def _physical_id(library: ctypes.CDLL, place: _Place, logical_id: int | None) -> int | None:
    if logical_id is None:
        return None
    function = "dcmiv2_get_chip_phy_id_by_dev_id" if place.v2 else "dcmi_get_device_phyid_from_logicid"
    value = c_uint()
    call(library, function, c_uint(logical_id), byref(value))
    return value.value


def _memory(library: ctypes.CDLL, place: _Place) -> tuple[int, int] | None:
    """Return (total, used) bytes: the HBM's, else the ordinary memory's; None when neither is known."""
    hbm, ordinary = HbmInfo(), MemoryInfo()
    _optional(lambda: place.call(library, "get_device_hbm_info", byref(hbm)))
    if hbm.memory_size:
        return hbm.memory_size * MIB, hbm.memory_usage * MIB
    _optional(lambda: place.call(library, "get_device_memory_info_v3", byref(ordinary)))
    if ordinary.memory_size:
        return ordinary.memory_size * MIB, (ordinary.memory_size - ordinary.memory_available) * MIB
    return None


def _names(library: ctypes.CDLL, place: _Place) -> tuple[str, str]:
    info = ChipInfo()
    try:
        place.call(library, "get_device_chip_info" if place.v2 else "get_device_chip_info_v2", byref(info))
    except DcmiError:
        place.call(library, "get_device_chip_info", byref(info))
    return _text(info.chip_name), _text(info.npu_name)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace").strip()


def _bus_id(library: ctypes.CDLL, place: _Place) -> str | None:
    info = PcieInfo()
    place.call(library, "get_device_pcie_info" if place.v2 else "get_device_pcie_info_v2", byref(info))
    address = (info.domain, info.bdf_busid, info.bdf_deviceid, info.bdf_funcid)
    return "{:04X}:{:02X}:{:02X}.{:X}".format(*address) if info.venderid else None


def _die_id(library: ctypes.CDLL, place: _Place) -> str | None:
    die = DieId()
    place.call(library, "get_device_die_id" if place.v2 else "get_device_die_v2", c_int(_VDIE), byref(die))
    return "-".join(f"{part:08x}" for part in die.soc_die) if any(die.soc_die) else None


def _utilization(library: ctypes.CDLL, place: _Place) -> float | None:
    percent = c_uint()
    place.call(library, "get_device_utilization_rate", c_int(_AI_CORE), byref(percent))
    return percent.value / 100 if percent.value <= 100 else None


def _linked(library: ctypes.CDLL, places: list[_Place], chips: list[Chip]) -> tuple[Chip, ...]:
    """Return the chips with the links among them. Version 2 has no such call."""
    links: list[dict[str, str]] = [{} for _ in chips]
    for one in range(len(chips)):
        for other in range(one + 1, len(chips)):
            name = _link(library, places[one], places[other])
            for here, there in ((one, other), (other, one)):
                if name is not None and chips[there].logical_id is not None:
                    links[here][str(chips[there].logical_id)] = name
    return tuple(replace(chip, links=found) for chip, found in zip(chips, links, strict=True))


def _link(library: ctypes.CDLL, one: _Place, other: _Place) -> str | None:
    if one.v2:
        return None
    kind = c_int(-1)
    peer = (c_int(other.npu_id), c_int(other.chip_id))
    _optional(lambda: one.call(library, "get_topo_info_by_device_id", *peer, byref(kind)))
    return _LINKS.get(kind.value)
