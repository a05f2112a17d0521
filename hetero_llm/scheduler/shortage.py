"""Why a cell has no place for (more) replicas: a funnel of devices, the first stage with too few left says so.

Stages: how many there are, healthy, large enough, free, enough memory free now, in whole cards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_llm.model import Device, ModelFacts, PoolWish, Rejection
from hetero_llm.scheduler.cells import Cell, free_budget_bytes, total_budget_bytes
from hetero_llm.scheduler.demand import Demand, Shape, demand_of
from hetero_llm.scheduler.filters import refuse
from hetero_llm.scheduler.groups import card_size
from hetero_llm.scheduler.resources import USABLE_HEALTH
from hetero_llm.scheduler.text import count, gib

# What a user can change soonest comes first: wait or ask for less; mend or ask differently; other hardware.
_RANK = {"in-use": 0, "count": 0, "memory": 0, "health": 1, "pairing": 1, "heads": 1, "kind": 3, "label": 3, "node": 3}
_RANK_OTHER = 2
_RANK_FAR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A refusal and how far from fitting it is: 0 nothing lacks, 1 everything does."""

    rejection: Rejection
    lack: float = 1.0

    @property
    def distance(self) -> tuple[int, float, str, str]:
        """Sort key, nearest miss first."""
        item = self.rejection
        # A node that has nothing of what is wanted is not near, although one could buy some.
        rank = _RANK_FAR if item.rule == "count" and self.lack >= 1 else _RANK.get(item.rule, _RANK_OTHER)
        return (rank, self.lack, item.node, item.accelerator)


def miss_of(cell: Cell, facts: ModelFacts, wish: PoolWish, shape: Shape, replicas: int) -> Miss:
    """Return why `cell` has no place for `replicas` replicas of `shape`. The caller knows that it has none."""
    demand = demand_of(cell, facts, wish, shape)
    if not demand.serves:
        return _cache_too_small(cell, demand)
    wanted = shape.devices * replicas
    return (
        _too_few(cell, shape, replicas, wanted)
        or _unhealthy(cell, wanted)
        or _too_small(cell, wish, demand, wanted)
        or _held(cell, wish, demand, wanted)
        or _too_full(cell, wish, demand, wanted)
        or _unpaired(cell, shape)
    )


def unhealthy_note(cell: Cell) -> Rejection | None:
    """Return the refusal of the unhealthy devices of a cell whose other devices are used."""
    bad = _bad(cell.devices)
    return refuse(cell, "health", f"{_named(bad)} not used: {_health(bad)}") if bad else None


def _cache_too_small(cell: Cell, demand: Demand) -> Miss:
    asked, needed = demand.least.kv_bytes, demand.context_bytes
    reason = (
        f"a KV cache of {gib(asked)} was asked for, one context of {demand.max_model_len} tokens needs {gib(needed)} "
        f"at {demand.shape}"
    )
    return Miss(rejection=refuse(cell, "memory", reason), lack=1 - asked / needed)


def _too_few(cell: Cell, shape: Shape, replicas: int, wanted: int) -> Miss | None:
    have = len(cell.devices)
    if have >= wanted:
        return None
    reason = f"{count(have, 'device')} here, {wanted} wanted for {count(replicas, 'replica')} of {shape}"
    return Miss(rejection=refuse(cell, "count", reason), lack=1 - have / wanted)


def _unhealthy(cell: Cell, wanted: int) -> Miss | None:
    bad = _bad(cell.devices)
    have = len(cell.devices) - len(bad)
    if have >= wanted:
        return None
    reason = (
        f"{have} of {count(len(cell.devices), 'device')} can be used, {wanted} wanted; {_named(bad)}: {_health(bad)}"
    )
    return Miss(rejection=refuse(cell, "health", reason), lack=1 - have / wanted)


def _too_small(cell: Cell, wish: PoolWish, demand: Demand, wanted: int) -> Miss | None:
    devices = _good(cell)
    budgets = [total_budget_bytes(device, wish.gpu_memory_utilization) for device in devices]
    return _memory(cell, wish, demand, wanted, devices, budgets)


def _held(cell: Cell, wish: PoolWish, demand: Demand, wanted: int) -> Miss | None:
    large = _large(cell, wish, demand)
    held = [device for device in large if device.held_by is not None]
    have = len(large) - len(held)
    if have >= wanted:
        return None
    holders = ", ".join(sorted({device.held_by for device in held if device.held_by is not None}))
    reason = f"{len(held)} of {count(len(cell.devices), 'device')} in use by {holders}; {have} free, {wanted} wanted"
    return Miss(rejection=refuse(cell, "in-use", reason), lack=1 - have / wanted)


def _too_full(cell: Cell, wish: PoolWish, demand: Demand, wanted: int) -> Miss | None:
    devices = [device for device in _large(cell, wish, demand) if device.held_by is None]
    budgets = [free_budget_bytes(device, wish.gpu_memory_utilization) for device in devices]
    return _memory(cell, wish, demand, wanted, devices, budgets)


def _memory(
    cell: Cell, wish: PoolWish, demand: Demand, wanted: int, devices: Sequence[Device], budgets: Sequence[int]
) -> Miss | None:
    fitting = sum(budget >= demand.least_bytes for budget in budgets)
    if fitting >= wanted:
        return None
    # The device that would have to fit next is the measure: the largest of those that do not.
    budget, device = max(
        ((b, d) for b, d in zip(budgets, devices, strict=True) if b < demand.least_bytes), key=lambda pair: pair[0]
    )
    lack = 1 - budget / demand.least_bytes if fitting == 0 else 1 - fitting / wanted
    reason = f"{_need(demand, wish)}; {_usable(device, budget, wish)}"
    if fitting:
        reason += f"; {fitting} of {count(len(cell.devices), 'device')} have that, {wanted} wanted"
    return Miss(rejection=refuse(cell, "memory", reason), lack=lack)


def _need(demand: Demand, wish: PoolWish) -> str:
    least = demand.least
    cache = "asked for" if wish.kv_cache_bytes is not None else f"of one {demand.max_model_len}-token context"
    return (
        f"{demand.shape} needs {gib(least.per_device_bytes)} per device (weights {gib(least.weights_bytes)}, KV cache "
        f"{cache} {gib(least.kv_bytes)}, overhead {gib(least.overhead_bytes)})"
    )


def _usable(device: Device, budget: int, wish: PoolWish) -> str:
    if device.memory_bytes is None:
        return "the memory of the device is not measured"
    if device.free_bytes is not None and device.free_bytes == budget:
        return f"{gib(budget)} of {gib(device.memory_bytes)} are free"
    return f"{gib(budget)} of {gib(device.memory_bytes)} may be used ({wish.gpu_memory_utilization:.0%})"


def _unpaired(cell: Cell, shape: Shape) -> Miss:
    size = card_size(cell)
    lack = "too few whole cards are free" if shape.devices % size == 0 else "that is no whole number of cards"
    cards = f"{cell.accelerator} is allocated in whole cards of {count(size, 'device')}"
    reason = f"{cards}; {shape} wants {shape.devices}, {lack}"
    return Miss(rejection=refuse(cell, "pairing", reason))


def _bad(devices: Iterable[Device]) -> list[Device]:
    return [device for device in devices if device.health not in USABLE_HEALTH]


def _good(cell: Cell) -> list[Device]:
    return [device for device in cell.devices if device.health in USABLE_HEALTH]


def _large(cell: Cell, wish: PoolWish, demand: Demand) -> list[Device]:
    utilization = wish.gpu_memory_utilization
    return [device for device in _good(cell) if total_budget_bytes(device, utilization) >= demand.least_bytes]


def _named(devices: Sequence[Device]) -> str:
    indices = ", ".join(str(device.index) for device in devices)
    return f"device {indices}" if len(devices) == 1 else f"devices {indices}"


def _health(devices: Sequence[Device]) -> str:
    return ", ".join(sorted({device.health.value for device in devices}))
