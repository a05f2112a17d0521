"""What would fit instead of a wish that does not: fewer replicas, another TP, several nodes, a shorter context, another
kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hetero_llm.model import ModelFacts, PoolWish
from hetero_llm.scheduler.cells import Cell
from hetero_llm.scheduler.demand import Shape
from hetero_llm.scheduler.filters import refusals
from hetero_llm.scheduler.placing import Offer, Placed, place
from hetero_llm.scheduler.spanning import Span
from hetero_llm.scheduler.text import count, listed
from hetero_llm.scheduler.tiers import tiers_of

# Halving steps: a context shorter than this is of no use to anybody.
_LEAST_CONTEXT_TOKENS = 512
_NAMED = 3


def alternatives(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> tuple[str, ...]:
    """Return what would fit of `wish`, nearest to it first, one sentence each; empty when nothing would."""
    return tuple(dict.fromkeys(_found(cells, facts, wish, placed)))


def _found(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish, placed: Placed) -> Iterator[str]:
    if placed.replicas:
        yield f"--replicas {placed.replicas} would fit: {_where(placed)}"
    other_shapes = tuple(_other_shapes(cells, facts, wish))
    yield from other_shapes
    if not placed.replicas:
        if not other_shapes and (spread := _over_nodes(cells, facts, wish)) is not None:
            yield spread
        if (shorter := _shorter_context(cells, facts, wish)) is not None:
            yield shorter
    yield from _other_kinds(cells, facts, wish)


def _other_shapes(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Iterator[str]:
    """Yield for each other TP that gives the wanted replicas in a single cell: the flags, and where.

    Of each cell the size nearest to the one that was asked for, of two equally near the larger.
    """
    if wish.tp is None:
        return
    wanted, asked = wish.replicas or 1, wish.tp
    freed = replace(wish, tp=None, pp=1, replicas=wanted)
    places: dict[Shape, list[str]] = {}
    for tier in tiers_of([cell for cell in cells if not refusals(cell, facts, freed)], facts, freed):
        for room in tier.rooms:
            shapes = [shape for shape, most in tier.capacity(room).items() if most >= wanted]
            if shapes:
                nearest = min(shapes, key=lambda shape: (abs(shape.tp - asked), -shape.tp))
                places.setdefault(nearest, []).append(_named(room.cell))
    for shape, where in sorted(places.items(), key=lambda item: (abs(item[0].tp - asked), -item[0].tp)):
        yield f"{_flags(shape, wish)} would fit: {count(wanted, 'replica')} on {listed(where, _NAMED, ' or ')}"


def _over_nodes(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> str | None:
    """Return the flags of a pipeline, over several nodes if need be, when only stages make the model fit."""
    if wish.pp is None:
        return None
    other = _try(cells, facts, replace(wish, tp=None, pp=None))
    if not other.replicas:
        return None
    shape = other.spans[0].demand.shape if other.spans else next(o.demand.shape for o in other.offers if o.groups)
    # One shape for all: with flags, no cell chooses its own.
    other = _try(cells, facts, replace(wish, tp=shape.tp, pp=shape.pp))
    fewer = f" --replicas {other.replicas}" if other.missing else ""
    return f"{_flags(shape, wish)}{fewer} would fit: {_where(other)}"


def _flags(shape: Shape, wish: PoolWish) -> str:
    pp = "" if (wish.pp or 1) == shape.pp else f" --pp {shape.pp}"
    return f"--tp {shape.tp}{pp}"


def _shorter_context(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> str | None:
    """Return the longest halving of the context that fits; the shortest is tried first, as it often settles it."""
    if not _try(cells, facts, replace(wish, max_model_len=_LEAST_CONTEXT_TOKENS)).feasible:
        return None
    tokens = (wish.max_model_len or facts.max_model_len) // 2
    while tokens >= _LEAST_CONTEXT_TOKENS:
        other = _try(cells, facts, replace(wish, max_model_len=tokens))
        if other.feasible:
            return f"a context of {tokens} tokens (max_model_len) would fit: {_where(other)}"
        tokens //= 2
    return None


def _other_kinds(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Iterator[str]:
    """Yield the kinds that nobody asked for and that would do; CPU is one of them unless it was named."""
    for kind in sorted({cell.kind for cell in cells} - set(wish.kinds)):
        alone = [cell for cell in cells if cell.kind == kind]
        if (other := _try(alone, facts, replace(wish, kinds=(kind,)))).feasible:
            yield f"--kind {kind} would fit: {_where(other)}"


def _try(cells: Sequence[Cell], facts: ModelFacts, wish: PoolWish) -> Placed:
    return place([cell for cell in cells if not refusals(cell, facts, wish)], facts, wish)


def _where(placed: Placed) -> str:
    alone = [_offer_text(offer) for offer in placed.offers if offer.groups]
    return listed([*alone, *(_span_text(span) for span in placed.spans)], _NAMED)


def _offer_text(offer: Offer) -> str:
    return f"{count(len(offer.groups), 'replica')} of {offer.demand.shape} on {_named(offer.cell)}"


def _span_text(span: Span) -> str:
    cells = [cell for cell, _ in span.groups[0]]
    where = f"{listed([cell.node for cell in cells], _NAMED)} ({cells[0].kind} {cells[0].accelerator})"
    each = "" if len(span.groups) == 1 else ", for example"
    return f"{count(len(span.groups), 'replica')} of {span.demand.shape}, each over {span.nodes} nodes{each}: {where}"


def _named(cell: Cell) -> str:
    return f"{cell.node} ({cell.kind} {cell.accelerator})"
