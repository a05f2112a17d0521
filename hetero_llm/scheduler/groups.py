"""Form the groups of a cell: which devices stand together in one replica, none twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hetero_llm.model import Device
from hetero_llm.scheduler.cells import Cell, Room, free_budget_bytes, is_free
from hetero_llm.scheduler.demand import Demand

Group = tuple[Device, ...]

PAIRING_CARD = "card"
"""Pairing rule of the hardware matrix: all dies of a card go to the same replica."""

# Ways between two devices that lead through PCIe, a host bridge or a CPU; every other name is a link of its own.
_SLOW_LINKS = frozenset({"pcie", "pci", "pix", "pxb", "pxn", "phb", "node", "sys", "soc", "host", "self", "none", "x"})


def group_count(room: Room, demand: Demand, utilization: float, size: int) -> int:
    """Return how many groups of `size` devices `form_groups` would give."""
    if is_paired(room.cell):
        return len(form_groups(room.cell, demand, utilization, size))
    return room.fitting(demand.least_bytes) // size


def form_groups(cell: Cell, demand: Demand, utilization: float, size: int) -> tuple[Group, ...]:
    """Return as many groups of `size` devices as the usable ones of `cell` give, best first.

    Devices of one island of fast links (NVLink, HCCS) stand together where they can, and of those the ones of one NUMA
    node; what is left over on several is combined last. Small islands are used first, so that large ones stay whole.
    Ranks are ascending by device index.
    """
    units = _units(cell, [device for device in cell.devices if is_usable(device, demand, utilization)])
    if not units:
        return ()
    groups: list[Group] = []
    left: list[Group] = []
    for island in sorted(_islands(cell, units), key=lambda units: _island_order(units, size)):
        formed, rest = _pack_by_numa(island, size)
        groups += formed
        left += rest
    left.sort(key=lambda unit: unit[0].index)
    groups += _pack(left, size)[0]
    return tuple(groups)


def is_usable(device: Device, demand: Demand, utilization: float) -> bool:
    """Say whether a rank can go to `device` now: healthy, held by nobody, enough memory free."""
    return is_free(device) and free_budget_bytes(device, utilization) >= demand.least_bytes


def free_devices(cell: Cell) -> tuple[Device, ...]:
    """Return the devices of `cell` that are healthy and held by nobody, whatever memory they have."""
    return tuple(device for device in cell.devices if is_free(device))


def is_paired(cell: Cell) -> bool:
    """Say whether the dies of a card must go to the same replica."""
    return cell.entry is not None and cell.entry.pairing == PAIRING_CARD


def card_size(cell: Cell) -> int:
    """Return the devices that must be taken together: the dies per card where the matrix says so, else 1."""
    return max((len(unit) for unit in _units(cell, cell.devices)), default=1)


def _units(cell: Cell, devices: Sequence[Device]) -> list[Group]:
    """Return `devices` in the smallest pieces that may be taken: one by one, or whole cards."""
    if not is_paired(cell):
        return [(device,) for device in devices]
    fitting = {device.uid for device in devices}
    return [card for card in _cards(cell.devices) if all(device.uid in fitting for device in card)]


def _cards(devices: Iterable[Device]) -> list[Group]:
    cards: dict[tuple[str, int], list[Device]] = {}
    for device in devices:
        key = ("device", device.index) if device.card is None else ("card", device.card)
        cards.setdefault(key, []).append(device)
    return [tuple(card) for card in cards.values()]


def _islands(cell: Cell, units: Sequence[Group]) -> Iterator[list[Group]]:
    """Yield the units in sets that fast links connect, directly or through others; all in one when nothing is known."""
    peers = {device.index: _fast_peers(device) for device in cell.devices}
    if not any(peers.values()):
        yield list(units)
        return
    island = _components(peers)
    found: dict[int, list[Group]] = {}
    for unit in units:
        found.setdefault(island[unit[0].index], []).append(unit)
    yield from found.values()


def _fast_peers(device: Device) -> set[int]:
    return {int(peer) for peer, name in device.links.items() if peer.isdigit() and name.lower() not in _SLOW_LINKS}


def _components(peers: dict[int, set[int]]) -> dict[int, int]:
    """Return for each index the smallest one it is connected to; a link that one side reports counts for both."""
    island = {index: index for index in peers}
    changed = True
    while changed:
        changed = False
        for index, others in peers.items():
            linked = {index, *(other for other in others if other in island)}
            least = min(island[one] for one in linked)
            for one in linked:
                if island[one] != least:
                    island[one], changed = least, True
    return island


def _island_order(units: Sequence[Group], size: int) -> tuple[bool, int, int]:
    devices = sum(map(len, units))
    return (devices < size, devices, min(unit[0].index for unit in units))


def _pack_by_numa(units: Sequence[Group], size: int) -> tuple[list[Group], list[Group]]:
    by_numa: dict[int, list[Group]] = {}
    for unit in units:
        # Devices that do not say where they hang form a domain of their own.
        by_numa.setdefault(-1 if unit[0].numa is None else unit[0].numa, []).append(unit)
    groups: list[Group] = []
    left: list[Group] = []
    for _, domain in sorted(by_numa.items()):
        formed, rest = _pack(domain, size)
        groups += formed
        left += rest
    left.sort(key=lambda unit: unit[0].index)
    formed, left = _pack(left, size)
    return groups + formed, left


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
