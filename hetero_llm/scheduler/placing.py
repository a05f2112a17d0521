"""Place replicas: tiers in order of preference, in each the hosts in turn, in each node the best shape.

A node offers as many replicas as its best shape gives. Among the shapes that give what is taken of it: the fewest
pipeline stages, then the largest TP, and one shape for the whole tier where there is one. So a wish for one replica
uses what the model's heads allow, a wish for as many as fit gets the smallest groups, and an additional device never
makes a plan worse. Groups over several nodes are formed only where single nodes give too little.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell, Room
from hetero_llm.scheduler.demand import Demand, Shape, shapes_for
from hetero_llm.scheduler.groups import Group, form_groups
from hetero_llm.scheduler.shortage import Miss, miss_of
from hetero_llm.scheduler.spanning import Span, best_span
from hetero_llm.scheduler.tiers import Tier, tiers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a cell gives by itself: groups of one shape, only as many as are taken."""

    cell: Cell
    demand: Demand
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Result of placing one wish.

    Attributes:
        offers: one per cell that has a place by itself, in order of preference; its `groups` are empty when not needed.
        spans: replicas over several nodes.
        missing: replicas wanted that have no place.
    """

    offers: tuple[Offer, ...]
    spans: tuple[Span, ...]
    missing: int

    @property
    def replicas(self) -> int:
        """Replicas that have a place."""
        return sum(len(offer.groups) for offer in self.offers) + sum(len(span.groups) for span in self.spans)

    @property
    def feasible(self) -> bool:
        """Every replica wanted has a place, and there is at least one."""
        return self.missing == 0 and self.replicas > 0

    @property
    def used(self) -> frozenset[tuple[str, str, str]]:
        """Node, kind and accelerator of the cells that have a place or are part of one."""
        alone = {_key(offer.cell) for offer in self.offers}
        return frozenset(alone | {_key(cell) for span in self.spans for group in span.groups for cell, _ in group})


def blocked(cells: Sequence[Cell], placed: Placed) -> list[Cell]:
    """Return those of `cells` that have no place at all."""
    used = placed.used
    return [cell for cell in cells if _key(cell) not in used]


def _key(cell: Cell) -> tuple[str, str, str]:
    return (cell.node, cell.kind, cell.accelerator)


def place(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Placed:
    """Place `wish` on `cells`, all of which are wanted and able to run the model."""
    tiers = tiers_of(cells, facts, wish)
    placed = _place(tiers, facts, wish, spanning=False)
    return placed if placed.feasible else _place(tiers, facts, wish, spanning=True)


def _place(tiers: Sequence[Tier], facts: ModelFacts, wish: PoolWish, *, spanning: bool) -> Placed:
    offers: list[Offer] = []
    spans: list[Span] = []
    hosts: Counter[str] = Counter()
    missing = wish.replicas
    for tier in tiers:
        alone = _offers(tier, missing, hosts)
        taken = sum(len(offer.groups) for offer in alone)
        span = best_span(tier, facts, wish, missing) if spanning and missing != 0 and taken != missing else None
        if span is not None and len(span.groups) > taken and (taken == 0 or missing is not None):
            spans.append(span)
            taken = len(span.groups)
        else:
            offers += alone
            hosts.update(offer.cell.host for offer in alone for _ in offer.groups)
        if missing is not None:
            missing -= taken
    return Placed(offers=tuple(offers), spans=tuple(spans), missing=missing or 0)


def _offers(tier: Tier, wanted: int | None, hosts: Counter[str]) -> list[Offer]:
    """Return what single cells of `tier` give towards `wanted` replicas (None: all they can)."""
    capacities = [(room, tier.capacity(room)) for room in tier.rooms]
    able = [(room, capacity) for room, capacity in capacities if capacity]
    most = [max(capacity.values()) for _, capacity in able]
    taken = most if wanted is None else _share_out([room for room, _ in able], most, wanted, hosts)
    common = _common_shape([capacity for _, capacity in able], taken)
    offers = []
    for (room, capacity), number in zip(able, taken, strict=True):
        shape = common if number and common is not None else _best_shape(capacity, max(number, 1))
        demand = tier.demands[shape]
        groups = form_groups(room.cell, demand, tier.utilization, shape.devices)[:number] if number else ()
        offers.append(Offer(cell=room.cell, demand=demand, groups=groups))
    return offers


def _share_out(rooms: Sequence[Room], most: Sequence[int], wanted: int, hosts: Counter[str]) -> list[int]:
    """Give out `wanted` replicas one by one, each to the host, then the node, that has fewest."""
    taken = [0] * len(rooms)
    on_host = Counter(hosts)
    queue = [(on_host[room.cell.host], 0, number) for number, room in enumerate(rooms)]
    heapq.heapify(queue)
    while queue and wanted:
        seen, _, number = heapq.heappop(queue)
        host = rooms[number].cell.host
        if seen < on_host[host]:
            # Another node of the host got one since this entry was made.
            heapq.heappush(queue, (on_host[host], taken[number], number))
            continue
        taken[number] += 1
        on_host[host] += 1
        wanted -= 1
        if taken[number] < most[number]:
            heapq.heappush(queue, (on_host[host], taken[number], number))
    return taken


def _common_shape(capacities: Sequence[Mapping[Shape, int]], taken: Sequence[int]) -> Shape | None:
    """Return the best shape that gives every cell's share, so that the tier's replicas are alike; None without one."""
    asked = [(capacity, number) for capacity, number in zip(capacities, taken, strict=True) if number]
    if not asked:
        return None
    shapes = [shape for shape in asked[0][0] if all(capacity.get(shape, 0) >= number for capacity, number in asked)]
    return min(shapes, key=_by_preference, default=None)


def _best_shape(capacity: Mapping[Shape, int], number: int) -> Shape:
    return min((shape for shape, most in capacity.items() if most >= number), key=_by_preference)


def _by_preference(shape: Shape) -> tuple[int, int]:
    return (shape.pp, -shape.tp)


def nearest_miss(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Miss:
    """Return why `cell` has no place for a single replica, for the shape that comes nearest."""
    shapes = shapes_for(cell, facts, wish) or (Shape(wish.tp or 1, wish.pp or 1),)
    misses = [miss_of(cell, facts, wish, shape, 1) for shape in shapes]
    return min(misses, key=lambda miss: miss.distance)
