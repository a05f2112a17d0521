"""What would fit instead of a wish that does not: fewer replicas, another TP, a shorter context, the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell
from hetero_llm.scheduler.filters import CPU, refused
from hetero_llm.scheduler.placing import Placed, place
from hetero_llm.scheduler.text import count

# Halving steps: a context shorter than this is of no use to anybody.
_LEAST_CONTEXT_TOKENS = 512


def alternatives(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> tuple[str, ...]:
    """Return what would fit of `wish`, nearest to it first, one sentence each; empty when nothing would."""
    return tuple(dict.fromkeys(_found(cells, facts, wish, placed)))


def _found(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> Iterator[str]:
    if placed.replicas:
        yield f"--replicas {placed.replicas} would fit: {_where(placed)}"
    if wish.tp is not None or wish.pp is not None:
        freed = replace(wish, tp=None, pp=None if wish.pp not in (None, 1) else wish.pp)
        if (other := _try(cells, facts, freed)).feasible:
            yield f"--tp auto would fit: {_where(other)}"
        elif (other := _try(cells, facts, replace(freed, replicas=None))).feasible and not placed.replicas:
            yield f"--tp auto --replicas {other.replicas} would fit: {_where(other)}"
    if not placed.replicas and (shorter := _shorter_context(cells, facts, wish)) is not None:
        yield shorter
    if not wish.kinds and (other := _try(cells, facts, replace(wish, kinds=(CPU,)))).feasible:
        yield f"--kind {CPU} would fit: {_where(other)}"


def _try(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Placed:
    return place([cell for cell in cells if refused(cell, facts, wish) is None], facts, wish)


def _shorter_context(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> str | None:
    tokens = (wish.max_model_len or facts.max_model_len) // 2
    while tokens >= _LEAST_CONTEXT_TOKENS:
        other = _try(cells, facts, replace(wish, max_model_len=tokens))
        if other.feasible:
            return f"a context of {tokens} tokens (max_model_len) would fit: {_where(other)}"
        tokens //= 2
    return None


def _where(placed: Placed) -> str:
    parts = [
        f"{count(len(offer.groups), 'replica')} of {offer.demand.shape} on {offer.cell.node} "
        f"({offer.cell.kind} {offer.cell.accelerator})"
        for offer in placed.offers
        if offer.groups
    ]
    return ", ".join(parts)
