"""Tiers: the cells of one accelerator, which a pool fills before it goes on to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell, Room, room_in, total_budget_bytes
from hetero_llm.scheduler.demand import Demand, Shape, demand_of, shapes_for
from hetero_llm.scheduler.estimate import roofline
from hetero_llm.scheduler.groups import group_count


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Cells of one kind and accelerator.

    Attributes:
        rooms: what is free in each, by node name.
        demands: what each shape that could go to some single cell needs; only shapes whose cache serves a context.
        utilization: share of a device that an engine may take.
    """

    rooms: tuple[Room, ...]
    demands: Mapping[Shape, Demand]
    utilization: float

    def capacity(self, room: Room) -> dict[Shape, int]:
        """Return how many replicas of each shape `room` has a place for; shapes without one are left out."""
        counts = {
            shape: group_count(room, demand, self.utilization, shape.devices) for shape, demand in self.demands.items()
        }
        return {shape: number for shape, number in counts.items() if number}


def tiers_of(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> tuple[Tier, ...]:
    """Return the tiers of `cells` in the order they are to be filled.

    Kinds in the user's order, then the fastest accelerator, then the one with the least memory, then by name.
    """
    grouped: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        grouped.setdefault((cell.kind, cell.accelerator), []).append(cell)
    ordered = sorted(grouped.values(), key=lambda alike: _preference(alike, facts, wish))
    return tuple(_tier(alike, facts, wish) for alike in ordered)


def _tier(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Tier:
    # Cells of one tier differ in size only, so the largest knows all shapes.
    largest = max(cells, key=lambda cell: len(cell.devices))
    demands = {shape: demand_of(largest, facts, wish, shape) for shape in shapes_for(largest, facts, wish)}
    return Tier(
        rooms=tuple(room_in(cell, wish.gpu_memory_utilization) for cell in sorted(cells, key=lambda cell: cell.node)),
        demands={shape: demand for shape, demand in demands.items() if demand.serves},
        utilization=wish.gpu_memory_utilization,
    )


def _preference(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> tuple[int, float, int, str, str]:
    first = cells[0]
    kind = wish.kinds.index(first.kind) if first.kind in wish.kinds else len(wish.kinds)
    speed = roofline(facts, 1, 1, first.entry)
    decode = (speed.decode_tokens_per_s if speed else None) or 0.0
    memory = max(total_budget_bytes(device, wish.gpu_memory_utilization) for cell in cells for device in cell.devices)
    return (kind, -decode, memory, first.kind, first.accelerator)
