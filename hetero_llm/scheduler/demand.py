"""What one replica of a given shape needs on each of its devices, and what the plan gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_llm.model import MemoryEstimate, ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell
from hetero_llm.scheduler.footprint import context_bytes, kv_block_bytes, kv_tokens, memory_estimate
from hetero_llm.scheduler.shapes import tp_sizes


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """Tensor- and pipeline-parallel size; ``tp * pp`` devices make a replica."""

    tp: int
    pp: int

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp}" if self.pp == 1 else f"TP {self.tp} x PP {self.pp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory a shape needs in a cell.

    Attributes:
        least: estimate with the smallest KV cache that serves: the size asked for, else one full context.
        context_bytes: KV cache of one full context.
        max_model_len: that context in tokens.
    """

    shape: Shape
    least: MemoryEstimate
    context_bytes: int
    max_model_len: int

    @property
    def least_bytes(self) -> int:
        """Bytes below which a device is of no use."""
        return self.least.per_device_bytes

    @property
    def serves(self) -> bool:
        """The KV cache that was asked for, if one was, holds one context."""
        return self.least.kv_bytes >= self.context_bytes


def demand_of(cell: Cell, facts: ModelFacts, wish: PoolWish, shape: Shape) -> Demand:
    """Return what a replica of `shape` needs on each device of `cell`."""
    tokens = wish.max_model_len or facts.max_model_len
    context = context_bytes(facts, shape.tp, shape.pp, tokens, cell.rules.block_size, wish.kv_cache_dtype)
    overhead = cell.rules.overhead_bytes(facts, shape.tp, shape.pp)
    least = memory_estimate(facts, shape.tp, shape.pp, wish.kv_cache_bytes or context, overhead)
    return Demand(shape=shape, least=least, context_bytes=context, max_model_len=tokens)


def granted(cell: Cell, facts: ModelFacts, wish: PoolWish, demand: Demand, budget_bytes: int) -> MemoryEstimate:
    """Return the memory of a replica whose tightest device may take `budget_bytes` (at least ``least_bytes``)."""
    if wish.kv_cache_bytes is not None:
        return demand.least
    shape, least = demand.shape, demand.least
    left = budget_bytes - least.weights_bytes - least.overhead_bytes
    limit = cell.rules.default_kv_bytes
    kv_bytes = left if limit is None else min(left, max(demand.context_bytes, limit))
    # A part of a block is of no use to the engine.
    kv_bytes -= kv_bytes % kv_block_bytes(facts, shape.tp, shape.pp, cell.rules.block_size, wish.kv_cache_dtype)
    return memory_estimate(facts, shape.tp, shape.pp, kv_bytes, least.overhead_bytes)


def cached_tokens(cell: Cell, facts: ModelFacts, wish: PoolWish, shape: Shape, memory: MemoryEstimate) -> int:
    """Return how many tokens the KV cache of `memory` holds."""
    return kv_tokens(facts, shape.tp, shape.pp, memory.kv_bytes, cell.rules.block_size, wish.kv_cache_dtype)


def shapes_for(cell: Cell, facts: ModelFacts, wish: PoolWish) -> tuple[Shape, ...]:
    """Return the shapes the wish allows in `cell`; those chosen for the user fit its devices and suit the kind."""
    return tuple(sorted(shape for shape in _shapes(cell, facts, wish) if suits(cell, facts, wish, shape)))


def suits(cell: Cell, facts: ModelFacts, wish: PoolWish, shape: Shape) -> bool:
    """Return whether the kind would take a shape that is chosen for the user, as if he had asked for it.

    A shape he did ask for is judged once for the whole cell, with its reason.
    """
    if wish.tp is not None and wish.pp is not None:
        return True
    return not cell.rules.check(facts, cell.accelerator, replace(wish, tp=shape.tp, pp=shape.pp))


def _shapes(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Iterator[Shape]:
    limit = len(cell.devices)
    features = ("tp", "pp") if cell.entry is None else cell.entry.features
    chosen_tps = tp_sizes(facts, limit if "tp" in features else 1)
    chosen_pps = range(1, (min(limit, facts.layers) if "pp" in features else 1) + 1)
    for tp in chosen_tps if wish.tp is None else (wish.tp,):
        for pp in chosen_pps if wish.pp is None else (wish.pp,):
            # A size the user fixed is kept even if it is too large, so that the refusal can name both numbers.
            if tp * pp <= limit or (wish.tp is not None and wish.pp is not None):
                yield Shape(tp, pp)
