"""Form the groups of a cell: which devices stand together in one replica, none twice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hetero_llm.model import Device
from hetero_llm.scheduler.cells import Cell, free_budget_bytes
from hetero_llm.scheduler.demand import Demand
from hetero_llm.scheduler.resources import USABLE_HEALTH

Group = tuple[Device, ...]

PAIRING_CARD = "card"
"""Pairing rule of the hardware matrix: all dies of a card go to the same replica."""


def form_groups(cell: Cell, demand: Demand, utilization: float) -> tuple[Group, ...]:
    """Return as many groups of `demand`'s shape as the usable devices of `cell` give, best first.

    Devices of one NUMA node stand together where they can; what is left over on several is combined last. Ranks are
    ascending by device index.
    """
    fitting = [device for device in cell.devices if is_usable(device, demand, utilization)]
    units = _units(cell, fitting)
    by_numa: dict[int, list[Group]] = {}
    for unit in units:
        # Devices that do not say where they hang form a domain of their own.
        by_numa.setdefault(-1 if unit[0].numa is None else unit[0].numa, []).append(unit)
    groups: list[Group] = []
    left: list[Group] = []
    for _, domain in sorted(by_numa.items()):
        formed, rest = _pack(domain, demand.shape.devices)
        groups += formed
        left += rest
    groups += _pack(left, demand.shape.devices)[0]
    return tuple(groups)


def is_usable(device: Device, demand: Demand, utilization: float) -> bool:
    """Say whether a rank can go to `device` now: healthy, held by nobody, enough memory free."""
    return _is_free(device) and free_budget_bytes(device, utilization) >= demand.least_bytes


def free_devices(cell: Cell) -> tuple[Device, ...]:
    """Return the devices of `cell` that are healthy and held by nobody, whatever memory they have."""
    return tuple(device for device in cell.devices if _is_free(device))


def _is_free(device: Device) -> bool:
    return device.health in USABLE_HEALTH and device.held_by is None


def card_size(cell: Cell) -> int:
    """Return the devices that must be taken together: the dies per card where the matrix says so, else 1."""
    return max((len(unit) for unit in _units(cell, cell.devices)), default=1)


def _units(cell: Cell, devices: Sequence[Device]) -> list[Group]:
    """Return `devices` in the smallest pieces that may be taken: one by one, or whole cards."""
    if cell.entry is None or cell.entry.pairing != PAIRING_CARD:
        return [(device,) for device in devices]
    fitting = {device.uid for device in devices}
    return [card for card in _cards(cell.devices) if all(device.uid in fitting for device in card)]


def _cards(devices: Iterable[Device]) -> list[Group]:
    cards: dict[tuple[str, int], list[Device]] = {}
    for device in devices:
        key = ("device", device.index) if device.card is None else ("card", device.card)
        cards.setdefault(key, []).append(device)
    return [tuple(card) for card in cards.values()]


def _pack(units: Sequence[Group], size: int) -> tuple[list[Group], list[Group]]:
    """Fill groups of exactly `size` devices from `units` in order; return the groups and the units not used."""
    groups: list[Group] = []
    current: list[Group] = []
    skipped: list[Group] = []
    for unit in units:
        if sum(map(len, current)) + len(unit) > size:
            skipped.append(unit)
            continue
        current.append(unit)
        if sum(map(len, current)) == size:
            groups.append(tuple(sorted((device for one in current for device in one), key=lambda d: d.index)))
            current = []
    return groups, skipped + current
