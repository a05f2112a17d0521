"""From places to the plan's replicas: names, memory, speed, and the reason in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hetero_llm.model import ModelFacts, Placement, PoolWish, ReplicaPlan
from hetero_llm.scheduler.cells import free_budget_bytes
from hetero_llm.scheduler.demand import Demand, cached_tokens, granted
from hetero_llm.scheduler.estimate import roofline
from hetero_llm.scheduler.groups import is_usable
from hetero_llm.scheduler.placing import Offer, Placed
from hetero_llm.scheduler.shapes import kv_note, tp_obstacle
from hetero_llm.scheduler.spanning import Span, SpanGroup
from hetero_llm.scheduler.text import count, gib


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seat:
    """The place of one replica and why it has that shape and place."""

    demand: Demand
    parts: SpanGroup
    reason: str


def replica_plans(placed: Placed, facts: ModelFacts, wish: PoolWish) -> tuple[ReplicaPlan, ...]:
    """Return the replicas that have a place, those of one node first, numbered by kind."""
    numbers: Counter[str] = Counter()
    plans = []
    for seat in _seats(placed, facts, wish):
        kind = seat.parts[0][0].kind
        numbers[kind] += 1
        plans.append(_replica_plan(seat, f"{_id_part(facts.name)}-{kind}-{numbers[kind]}", facts, wish))
    return tuple(plans)


def _seats(placed: Placed, facts: ModelFacts, wish: PoolWish) -> Iterator[_Seat]:
    for offer in placed.offers:
        if offer.groups:
            reason = f"{offer.demand.shape} as asked" if wish.tp is not None else _why_tp(offer, facts, wish)
            for group in offer.groups:
                yield _Seat(demand=offer.demand, parts=((offer.cell, group),), reason=reason)
    for span in placed.spans:
        for parts in span.groups:
            yield _Seat(demand=span.demand, parts=parts, reason=_why_span(span))


def _replica_plan(seat: _Seat, name: str, facts: ModelFacts, wish: PoolWish) -> ReplicaPlan:
    cell, shape = seat.parts[0][0], seat.demand.shape
    devices = [device for _, group in seat.parts for device in group]
    budget = min(free_budget_bytes(device, wish.gpu_memory_utilization) for device in devices)
    memory = granted(cell, facts, wish, seat.demand, budget)
    parts = [seat.reason, kv_note(facts, shape.tp), f"{gib(memory.per_device_bytes)} of {gib(budget)} per device"]
    if not cell.known:
        parts.append(f"no plugin for {cell.kind} is loaded here, so its own limits were not checked")
    return ReplicaPlan(
        id=name,
        kind=cell.kind,
        accelerator=cell.accelerator,
        tp=shape.tp,
        pp=shape.pp,
        placement=tuple(
            Placement(node=part.node, devices=tuple(device.uid for device in group)) for part, group in seat.parts
        ),
        memory=memory,
        kv_tokens=cached_tokens(cell, facts, wish, shape, memory),
        max_model_len=seat.demand.max_model_len,
        estimate=roofline(facts, shape.tp, shape.pp, cell.entry),
        why="; ".join(part for part in parts if part is not None),
        simulated=any(device.simulated for device in devices),
        labels=wish.labels,
    )


def _id_part(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def _why_tp(offer: Offer, facts: ModelFacts, wish: PoolWish) -> str:
    shape = offer.demand.shape
    free = sum(is_usable(device, offer.demand, wish.gpu_memory_utilization) for device in offer.cell.devices)
    largest = free // (len(offer.groups) * shape.pp)
    obstacle = tp_obstacle(facts, largest)
    text = f"{shape} chosen for {count(len(offer.groups), 'replica')} on {count(free, 'free device')}"
    return text if obstacle is None or largest == shape.tp else f"{text}: TP {largest} does not divide {obstacle}"


def _why_span(span: Span) -> str:
    shape = span.demand.shape
    each = shape.devices // span.nodes
    return f"{shape} over {span.nodes} nodes, {count(each, 'device')} of each: single nodes have too few places"
