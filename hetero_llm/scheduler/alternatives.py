"""What would fit instead of a wish that does not: fewer replicas, another TP, a shorter context, the CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell
from hetero_llm.scheduler.demand import Shape
from hetero_llm.scheduler.filters import CPU, refusals
from hetero_llm.scheduler.placing import Offer, Placed, place
from hetero_llm.scheduler.text import count

# Halving steps: a context shorter than this is of no use to anybody.
_LEAST_CONTEXT_TOKENS = 512


def alternatives(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> tuple[str, ...]:
    """Return what would fit of `wish`, nearest to it first, one sentence each; empty when nothing would."""
    return tuple(dict.fromkeys(_found(cells, facts, wish, placed)))


def _found(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> Iterator[str]:
    if placed.replicas:
        yield f"--replicas {placed.replicas} would fit: {_where(placed)}"
    yield from _other_shapes(cells, facts, wish)
    if not placed.replicas and (shorter := _shorter_context(cells, facts, wish)) is not None:
        yield shorter
    if not wish.kinds and (other := _try(cells, facts, replace(wish, kinds=(CPU,)))).feasible:
        yield f"--kind {CPU} would fit: {_where(other)}"


def _other_shapes(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Iterator[str]:
    """Yield for each other TP and PP that gives the wanted replicas in a single cell: the flags, and where."""
    if wish.tp is None:
        return
    freed = replace(wish, tp=None, pp=1, replicas=wish.replicas or 1)
    places: dict[Shape, list[str]] = {}
    for cell in cells:
        if (other := _try([cell], facts, freed)).feasible:
            offer = other.offers[0]
            places.setdefault(offer.demand.shape, []).append(_named(offer))
    for shape, where in sorted(places.items(), reverse=True):
        pp = "" if (wish.pp or 1) == shape.pp else f" --pp {shape.pp}"
        yield f"--tp {shape.tp}{pp} would fit: {count(freed.replicas or 1, 'replica')} on {' or '.join(where)}"


def _try(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Placed:
    return place([cell for cell in cells if not refusals(cell, facts, wish)], facts, wish)


def _shorter_context(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> str | None:
    tokens = (wish.max_model_len or facts.max_model_len) // 2
    while tokens >= _LEAST_CONTEXT_TOKENS:
        other = _try(cells, facts, replace(wish, max_model_len=tokens))
        if other.feasible:
            return f"a context of {tokens} tokens (max_model_len) would fit: {_where(other)}"
        tokens //= 2
    return None


def _where(placed: Placed) -> str:
    return ", ".join(
        f"{count(len(offer.groups), 'replica')} of {offer.demand.shape} on {_named(offer)}"
        for offer in placed.offers
        if offer.groups
    )


def _named(offer: Offer) -> str:
    return f"{offer.cell.node} ({offer.cell.kind} {offer.cell.accelerator})"
