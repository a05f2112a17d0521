"""Place replicas: cells in order of preference, in each the best shape, as many groups as are wanted.

In a cell the shape is chosen so that no other would give more of the wanted replicas; among those, the fewest pipeline
stages, then the largest TP. So a wish for one replica uses what the model's heads allow, a wish for as many as fit gets
the smallest groups, and an additional device never makes a plan worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell, total_budget_bytes
from hetero_llm.scheduler.demand import Demand, Shape, demand_of, shapes_for
from hetero_llm.scheduler.estimate import roofline
from hetero_llm.scheduler.groups import Group, form_groups
from hetero_llm.scheduler.shortage import Miss, miss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a cell gives: groups of one shape, only as many as are taken.

    Attributes:
        possible: groups of this shape the cell could give.
        groups: those that are taken.
    """

    cell: Cell
    demand: Demand
    possible: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Result of placing one wish.

    Attributes:
        offers: one per cell that has a place, in order of preference; its `groups` are empty when not needed.
        blocked: cells without any place.
        missing: replicas wanted that have no place.
    """

    offers: tuple[Offer, ...]
    blocked: tuple[Miss, ...]
    missing: int

    @property
    def replicas(self) -> int:
        """Replicas that have a place."""
        return sum(len(offer.groups) for offer in self.offers)

    @property
    def feasible(self) -> bool:
        """Every replica wanted has a place, and there is at least one."""
        return self.missing == 0 and self.replicas > 0


def place(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Placed:
    """Place `wish` on `cells`, all of which are wanted and able to run the model."""
    offers: list[Offer] = []
    blocked: list[Miss] = []
    missing = wish.replicas
    for cell in sorted(cells, key=lambda cell: _preference(cell, facts, wish)):
        offer = best_offer(cell, facts, wish, missing)
        if offer is None:
            blocked.append(nearest_miss(cell, facts, wish))
            continue
        offers.append(offer)
        if missing is not None:
            missing -= len(offer.groups)
    return Placed(offers=tuple(offers), blocked=tuple(blocked), missing=missing or 0)


def best_offer(cell: Cell, facts: ModelFacts, wish: PoolWish, wanted: int | None) -> Offer | None:
    """Return what `cell` gives towards `wanted` replicas (None: all it can), None when it has no place at all."""
    possible = []
    for shape in shapes_for(cell, facts, wish):
        demand = demand_of(cell, facts, wish, shape)
        if demand.least.kv_bytes >= demand.context_bytes:
            groups = form_groups(cell, demand, wish.gpu_memory_utilization)
            possible.append((shape, demand, groups))
    most = max((len(groups) for _, _, groups in possible), default=0)
    if most == 0:
        return None
    target = most if wanted is None else min(most, max(wanted, 1))
    _, demand, groups = min(
        (item for item in possible if len(item[2]) >= target), key=lambda item: (item[0].pp, -item[0].tp)
    )
    taken = groups if wanted is None else groups[:wanted]
    return Offer(cell=cell, demand=demand, possible=len(groups), groups=taken)


def nearest_miss(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Miss:
    """Return why `cell` has no place for a single replica, for the shape that comes nearest."""
    shapes = shapes_for(cell, facts, wish) or (Shape(wish.tp or 1, wish.pp or 1),)
    misses = [miss_of(cell, facts, wish, shape, 1) for shape in shapes]
    return min(misses, key=lambda miss: miss.distance)


def _preference(cell: Cell, facts: ModelFacts, wish: PoolWish) -> tuple[int, float, int, str, str]:
    """Sort key: kinds in the user's order, then the fastest accelerator, then the smallest that fits, then by name."""
    kind = wish.kinds.index(cell.kind) if cell.kind in wish.kinds else len(wish.kinds)
    speed = roofline(facts, 1, 1, cell.entry)
    decode = (speed.decode_tokens_per_s if speed else None) or 0.0
    memory = max(total_budget_bytes(device, wish.gpu_memory_utilization) for device in cell.devices)
    return (kind, -decode, memory, cell.node, cell.accelerator)
