"""Inventory and a wish in, a plan out. Pure and deterministic: the order of nodes and devices does not matter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from hetero_llm.errors import PlanInfeasible, UsageError
from hetero_llm.matrix import Matrix
from hetero_llm.model import ModelFacts, NodeInventory, Placement, Plan, PoolWish, Rejection, ReplicaPlan
from hetero_llm.scheduler.alternatives import alternatives
from hetero_llm.scheduler.cells import Cell, cells_of, free_budget_bytes
from hetero_llm.scheduler.demand import cached_tokens, granted
from hetero_llm.scheduler.estimate import roofline
from hetero_llm.scheduler.filters import CPU, refusals, refuse
from hetero_llm.scheduler.groups import Group, free_devices, is_usable
from hetero_llm.scheduler.placing import Offer, Placed, place
from hetero_llm.scheduler.rules import KindRules, rules_of
from hetero_llm.scheduler.shapes import kv_note, tp_obstacle
from hetero_llm.scheduler.shortage import Miss, miss_of, unhealthy_note
from hetero_llm.scheduler.text import count, gib

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
    cells = cells_of(nodes, rules, matrix)
    checked = [(cell, refusals(cell, facts, wish)) for cell in cells]
    able = [cell for cell, found in checked if not found]
    placed = place(able, facts, wish)
    misses = [Miss(rejection=rejection) for _, found in checked for rejection in found]
    misses += placed.blocked
    misses += _offer_misses(placed, facts, wish)
    misses += [Miss(rejection=rejection) for rejection in _absent(nodes, cells, wish)]
    summary = [] if placed.feasible else _nowhere(able, placed, wish)
    ordered = [miss.rejection for miss in sorted(misses, key=lambda miss: miss.distance)]
    return Plan(
        model=facts,
        feasible=placed.feasible,
        replicas=_replica_plans(placed, facts, wish),
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


def _replica_plans(placed: Placed, facts: ModelFacts, wish: PoolWish) -> tuple[ReplicaPlan, ...]:
    numbers: dict[str, int] = {}
    plans = []
    for offer in placed.offers:
        for group in offer.groups:
            numbers[offer.cell.kind] = number = numbers.get(offer.cell.kind, 0) + 1
            plans.append(_replica_plan(offer, group, number, facts, wish))
    return tuple(plans)


def _replica_plan(offer: Offer, group: Group, number: int, facts: ModelFacts, wish: PoolWish) -> ReplicaPlan:
    cell, demand, shape = offer.cell, offer.demand, offer.demand.shape
    budget = min(free_budget_bytes(device, wish.gpu_memory_utilization) for device in group)
    memory = granted(cell, facts, wish, demand, budget)
    return ReplicaPlan(
        id=f"{_id_part(facts.name)}-{cell.kind}-{number}",
        kind=cell.kind,
        accelerator=cell.accelerator,
        tp=shape.tp,
        pp=shape.pp,
        placement=(Placement(node=cell.node, devices=tuple(device.uid for device in group)),),
        memory=memory,
        kv_tokens=cached_tokens(cell, facts, shape, memory),
        max_model_len=demand.max_model_len,
        estimate=roofline(facts, shape.tp, shape.pp, cell.entry),
        why=_why(offer, memory.per_device_bytes, budget, facts, wish),
    )


def _id_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _why(offer: Offer, used_bytes: int, budget_bytes: int, facts: ModelFacts, wish: PoolWish) -> str:
    shape = offer.demand.shape
    parts = [f"{shape} as asked" if wish.tp is not None else _why_tp(offer, facts, wish)]
    note = kv_note(facts, shape.tp)
    if note is not None:
        parts.append(note)
    parts.append(f"{gib(used_bytes)} of {gib(budget_bytes)} per device")
    if not offer.cell.known:
        parts.append(f"no plugin for {offer.cell.kind} is loaded here, so its own limits were not checked")
    return "; ".join(parts)


def _why_tp(offer: Offer, facts: ModelFacts, wish: PoolWish) -> str:
    shape = offer.demand.shape
    free = sum(is_usable(device, offer.demand, wish.gpu_memory_utilization) for device in offer.cell.devices)
    largest = free // (len(offer.groups) * shape.pp)
    obstacle = tp_obstacle(facts, largest)
    text = f"{shape} chosen for {count(len(offer.groups), 'replica')} on {count(free, 'free device')}"
    return text if obstacle is None or largest == shape.tp else f"{text}: TP {largest} does not divide {obstacle}"


def _offer_misses(placed: Placed, facts: ModelFacts, wish: PoolWish) -> Iterator[Miss]:
    """What the cells that have places cannot give, or need not."""
    for offer in placed.offers:
        taken, cell = len(offer.groups), offer.cell
        if placed.missing:
            yield miss_of(cell, facts, wish, offer.demand.shape, taken + placed.missing)
        elif not taken:
            reason = f"not needed: all {count(placed.replicas, 'replica')} asked for have a place elsewhere"
            yield Miss(rejection=refuse(cell, "count", reason))
        if not placed.missing and (note := unhealthy_note(cell)) is not None:
            yield Miss(rejection=note)


def _nowhere(able: Sequence[Cell], placed: Placed, wish: PoolWish) -> list[Rejection]:
    """Say in one sentence that no node has enough free devices of one kind, when that is all that lacks."""
    rules = {miss.rejection.rule for miss in placed.blocked}
    if placed.offers or len(able) < 2 or not rules <= {"count", "in-use", "health"}:
        return []
    size = (wish.tp or 1) * (wish.pp or 1)
    free = ", ".join(f"{cell.kind} {len(free_devices(cell))} on {cell.node}" for cell in able)
    reason = f"no kind has {size} free on one node, and a group never spans nodes or kinds; free are: {free}"
    return [Rejection(node=ANY, kind=ANY, accelerator=ANY, rule="count", reason=reason)]


def _absent(nodes: Sequence[NodeInventory], cells: Sequence[Cell], wish: PoolWish) -> Iterator[Rejection]:
    """Nodes that show problems instead of devices, and kinds that were asked for and are nowhere."""
    for node in nodes:
        if not node.devices:
            for problem in node.problems:
                yield Rejection(node=node.node, kind=problem.kind, accelerator=ANY, rule="health", reason=problem.text)
    present = sorted({cell.kind for cell in cells})
    for kind in wish.kinds:
        if kind not in present:
            reason = f"no node has {kind} devices; there are: {', '.join(present) or 'none at all'}"
            yield Rejection(node=ANY, kind=kind, accelerator=ANY, rule="kind", reason=reason)
    if not present and not wish.kinds:
        yield Rejection(
            node=ANY, kind=ANY, accelerator=ANY, rule="kind", reason=f"no device of any kind was found, {CPU} included"
        )
