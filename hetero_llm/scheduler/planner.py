"""Inventory and a wish in, a plan out. Pure and deterministic: the order of nodes and devices does not matter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetero_llm.errors import PlanInfeasible, UsageError
from hetero_llm.matrix import Matrix
from hetero_llm.model import ModelFacts, NodeInventory, Plan, PoolWish, Rejection
from hetero_llm.scheduler.alternatives import alternatives
from hetero_llm.scheduler.cells import Cell, cells_of
from hetero_llm.scheduler.filters import CPU, refusals, refuse
from hetero_llm.scheduler.groups import free_devices
from hetero_llm.scheduler.placing import Placed, blocked, nearest_miss, place
from hetero_llm.scheduler.replicas import replica_plans
from hetero_llm.scheduler.rules import KindRules, asked_once, rules_of
from hetero_llm.scheduler.shortage import Miss, miss_of, unhealthy_note
from hetero_llm.scheduler.text import count, listed

__all__ = ["ANY", "KindRules", "make_plan", "require_feasible", "rules_of"]

ANY = "*"
"""Stands for all nodes, kinds or accelerators in a rejection."""


def make_plan(
    facts: ModelFacts,
    wish: PoolWish,
    nodes: Sequence[NodeInventory],
    rules: Mapping[str, KindRules],
    matrix: Matrix | None,
) -> Plan:
    """Return which devices each replica of `wish` takes, and why every other choice was refused.

    Args:
        rules: limits of each kind a plugin is loaded for; other kinds are planned without limits of their own.
        matrix: known accelerators, for dtypes, features, pairing and first speed estimates; None for none.

    Raises:
        UsageError: a number of the wish is out of range.
    """
    _require_sane(wish)
    cells = cells_of(nodes, {kind: asked_once(limits) for kind, limits in rules.items()}, matrix)
    checked = [(cell, refusals(cell, facts, wish)) for cell in cells]
    able = [cell for cell, found in checked if not found]
    placed = place(able, facts, wish)
    misses = [Miss(rejection=rejection) for _, found in checked for rejection in found]
    misses += [nearest_miss(cell, facts, wish) for cell in blocked(able, placed)]
    misses += _offer_misses(placed, facts, wish)
    misses += [Miss(rejection=rejection) for rejection in _absent(nodes, cells, wish)]
    summary = [] if placed.feasible else _nowhere(able, placed, misses, wish)
    ordered = [miss.rejection for miss in sorted(misses, key=lambda miss: miss.distance)]
    return Plan(
        model=facts,
        feasible=placed.feasible,
        replicas=replica_plans(placed, facts, wish),
        rejections=(*summary, *ordered),
        alternatives=() if placed.feasible else alternatives(cells, facts, wish, placed),
    )


def require_feasible(plan: Plan) -> None:
    """Do nothing for a feasible plan.

    Raises:
        PlanInfeasible: with the nearest miss as its cause and what would fit as next steps.
    """
    if plan.feasible:
        return
    nearest = plan.rejections[0]
    where = "" if nearest.node == ANY else f"{nearest.node} ({nearest.kind} {nearest.accelerator}): "
    placed = f"; {count(len(plan.replicas), 'replica')} would have a place" if plan.replicas else ""
    raise PlanInfeasible(
        f"no place for {plan.model.name} as asked{placed}",
        cause=f"{where}{nearest.rule}: {nearest.reason}",
        next=(*plan.alternatives, "hetero-llm plan shows every refusal", "hetero-llm devices"),
    )


def _require_sane(wish: PoolWish) -> None:
    for name, value in (("tp", wish.tp), ("pp", wish.pp), ("replicas", wish.replicas)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be 1 or more, it is {value}")
    for name, value in (("max_model_len", wish.max_model_len), ("kv_cache_bytes", wish.kv_cache_bytes)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be positive, it is {value}")
    if not 0 < wish.gpu_memory_utilization <= 1:
        raise UsageError(f"gpu_memory_utilization must be above 0 and at most 1, it is {wish.gpu_memory_utilization}")


def _offer_misses(placed: Placed, facts: ModelFacts, wish: PoolWish) -> Iterator[Miss]:
    """What the cells that have places cannot give, or need not."""
    for offer in placed.offers:
        taken, cell = len(offer.groups), offer.cell
        if placed.missing:
            yield miss_of(cell, facts, wish, offer.demand.shape, taken + placed.missing)
        elif not taken:
            whole = "the replica" if placed.replicas == 1 else f"all {placed.replicas} replicas"
            reason = f"not needed: there is a place elsewhere for {whole}"
            yield Miss(rejection=refuse(cell, "count", reason))
        if not placed.missing and (note := unhealthy_note(cell)) is not None:
            yield Miss(rejection=note)


def _nowhere(able: Sequence[Cell], placed: Placed, misses: Sequence[Miss], wish: PoolWish) -> list[Rejection]:
    """Say in one sentence that no node has enough free devices of one kind, when that is all that lacks."""
    nodes = {cell.node for cell in able}
    rules = {miss.rejection.rule for miss in misses if miss.rejection.node in nodes}
    if placed.replicas or len(able) < 2 or not rules <= {"count", "in-use", "health"}:
        return []
    size = (wish.tp or 1) * (wish.pp or 1)
    ordered = sorted(able, key=lambda cell: (-len(free_devices(cell)), cell.kind, cell.node))
    free = listed([f"{cell.kind} {len(free_devices(cell))} on {cell.node}" for cell in ordered])
    reason = (
        f"no kind has {size} free on one node, nor in equal parts on several, and a group never spans kinds; "
        f"free are: {free}"
    )
    return [Rejection(node=ANY, kind=ANY, accelerator=ANY, rule="count", reason=reason)]


def _absent(nodes: Sequence[NodeInventory], cells: Sequence[Cell], wish: PoolWish) -> Iterator[Rejection]:
    """Nodes that have no devices, and kinds that were asked for and are nowhere."""
    for node in sorted(nodes, key=lambda node: node.node):
        if not node.devices:
            yield from _bare(node, wish)
    present = sorted({cell.kind for cell in cells})
    for kind in wish.kinds:
        if kind not in present:
            reason = f"no node has {kind} devices; there are: {', '.join(present) or 'none at all'}"
            yield Rejection(node=ANY, kind=kind, accelerator=ANY, rule="kind", reason=reason)
    if not present and not wish.kinds:
        yield Rejection(
            node=ANY, kind=ANY, accelerator=ANY, rule="kind", reason=f"no device of any kind was found, {CPU} included"
        )


def _bare(node: NodeInventory, wish: PoolWish) -> Iterator[Rejection]:
    """Say why a node without devices is not used: its problems, or that it has none, which is no fault."""
    for problem in node.problems:
        yield Rejection(node=node.node, kind=problem.kind, accelerator=ANY, rule="health", reason=problem.text)
    if not node.problems:
        reason = f"0 devices here, {(wish.tp or 1) * (wish.pp or 1)} wanted for a replica"
        rule, reason = ("count", reason) if node.alive else ("node", "the node does not answer")
        yield Rejection(node=node.node, kind=node.kind, accelerator=ANY, rule=rule, reason=reason)
