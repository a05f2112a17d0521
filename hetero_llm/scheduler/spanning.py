"""Groups over several nodes of one kind, for models that are too large for any single node.

Every node of a group gives the same number of devices, as vLLM asks. Pipeline stages stay on one node each; TP leaves
its node only when the user fixed a TP size that no node has, because every layer then waits for the network.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell, Room
from hetero_llm.scheduler.demand import Demand, Shape, demand_of, suits
from hetero_llm.scheduler.groups import Group, form_groups, group_count
from hetero_llm.scheduler.shapes import tp_sizes
from hetero_llm.scheduler.tiers import Tier

SpanGroup = tuple[tuple[Cell, Group], ...]
"""Devices of one replica, node by node in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Replicas of one shape, each over `nodes` nodes."""

    demand: Demand
    nodes: int
    groups: tuple[SpanGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A way to spread a shape: so many nodes with so many devices each, and how many replicas of it there can be."""

    demand: Demand
    nodes: int
    rooms: tuple[Room, ...]
    replicas: int

    @property
    def devices_per_node(self) -> int:
        return self.demand.shape.devices // self.nodes


def best_span(tier: Tier, facts: ModelFacts, wish: PoolWish, wanted: int | None) -> Span | None:
    """Return up to `wanted` replicas (None: all that fit) over as few nodes each as will do; None when there is none.

    Fewest nodes that give all that is wanted, then fewest stages, then the largest TP; else whatever gives most.
    """
    best: _Layout | None = None
    for layout in _layouts(tier, facts, wish, wanted):
        if best is None or layout.replicas > best.replicas:
            best = layout
        if wanted is not None and best.replicas >= wanted:
            break
    return None if best is None else _span(best, tier.utilization)


def _layouts(tier: Tier, facts: ModelFacts, wish: PoolWish, wanted: int | None) -> Iterator[_Layout]:
    cell = max((room.cell for room in tier.rooms), key=lambda cell: len(cell.devices))
    most_bytes = max((room.budgets[-1] for room in tier.rooms if room.budgets), default=0)
    for nodes in range(2, len(tier.rooms) + 1):
        for shape in _shapes_over(nodes, cell, facts, wish):
            demand = demand_of(cell, facts, wish, shape)
            if demand.serves and demand.least_bytes <= most_bytes:
                layout = _fullest(tier, demand, nodes, wanted)
                if layout.replicas:
                    yield layout
        if nodes >= _most_nodes(facts, wish):
            return


def _most_nodes(facts: ModelFacts, wish: PoolWish) -> int:
    return (wish.pp or facts.layers) * (wish.tp or 1)


def _shapes_over(nodes: int, cell: Cell, facts: ModelFacts, wish: PoolWish) -> list[Shape]:
    """Return the shapes that `nodes` nodes of `cell`'s size can share equally, the preferred first."""
    if not cell.rules.spans_nodes or (wish.tp is None and wish.pp == 1):
        return []
    limit = len(cell.devices)
    features = ("tp", "pp") if cell.entry is None else cell.entry.features
    tps = (wish.tp,) if wish.tp is not None else tp_sizes(facts, limit if "tp" in features else 1)
    shapes = {shape for tp in tps for shape in _stages(nodes, tp, limit, facts, wish, "pp" in features)}
    suitable = (shape for shape in shapes if suits(cell, facts, wish, shape))
    return sorted(suitable, key=lambda shape: (shape.pp, -shape.tp))


def _stages(nodes: int, tp: int, limit: int, facts: ModelFacts, wish: PoolWish, pp_works: bool) -> Iterator[Shape]:
    if wish.pp is not None:
        pps: Sequence[int] = (wish.pp,)
    else:
        pps = range(nodes, min(facts.layers, nodes * (limit // tp)) + 1, nodes) if pp_works else (1,)
    for pp in pps:
        share, rest = divmod(tp * pp, nodes)
        if rest or not 0 < share <= limit:
            continue
        whole_stages, tp_may_leave = share % tp == 0, wish.tp is not None and tp % share == 0
        if whole_stages or tp_may_leave:
            yield Shape(tp, pp)


def _fullest(tier: Tier, demand: Demand, nodes: int, wanted: int | None) -> _Layout:
    """Return the layout on those nodes of equal engine versions that give most replicas."""
    layouts = (
        _Layout(demand=demand, nodes=nodes, rooms=rooms, replicas=_replicas(tier, rooms, demand, nodes, wanted))
        for _, rooms in sorted(_by_version(tier.rooms).items())
    )
    return max(layouts, key=lambda layout: layout.replicas)


def _by_version(rooms: Sequence[Room]) -> Mapping[tuple[str, str], tuple[Room, ...]]:
    """Ranks of one group must run the same engine."""
    alike: dict[tuple[str, str], list[Room]] = {}
    for room in rooms:
        versions = room.cell.versions
        alike.setdefault((versions.get("vllm") or "", versions.get("plugin") or ""), []).append(room)
    return {key: tuple(members) for key, members in alike.items()}


def _replicas(tier: Tier, rooms: Sequence[Room], demand: Demand, nodes: int, wanted: int | None) -> int:
    """Return the largest m up to `wanted` for which the nodes hold m groups, each on `nodes` different ones.

    A node with s shares serves at most min(s, m) of m groups, so m works exactly when those add up to nodes * m.
    """
    shares = _shares(tier, rooms, demand, nodes)
    low, high = 0, min(sum(shares) // nodes, sum(shares) if wanted is None else wanted)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(min(share, middle) for share in shares) >= nodes * middle:
            low = middle
        else:
            high = middle - 1
    return low


def _shares(tier: Tier, rooms: Sequence[Room], demand: Demand, nodes: int) -> list[int]:
    size = demand.shape.devices // nodes
    return [group_count(room, demand, tier.utilization, size) for room in rooms]


def _span(layout: _Layout, utilization: float) -> Span:
    """Take for each replica the nodes with most shares left: that never leaves a share without partners."""
    size = layout.devices_per_node
    free = [list(form_groups(room.cell, layout.demand, utilization, size)) for room in layout.rooms]
    heap = [(-len(groups), place) for place, groups in enumerate(free) if groups]
    heapq.heapify(heap)
    taken = []
    for _ in range(layout.replicas):
        chosen = [heapq.heappop(heap)[1] for _ in range(layout.nodes)]
        taken.append(tuple((layout.rooms[place].cell, free[place].pop(0)) for place in sorted(chosen)))
        for place in chosen:
            if free[place]:
                heapq.heappush(heap, (-len(free[place]), place))
    return Span(demand=layout.demand, nodes=layout.nodes, groups=tuple(taken))
