"""Rules that decide about a whole cell before any device is counted: wanted at all, and able to run the model at all.

Each filter takes (cell, facts, wish) and returns a refusal or None. A cell that is not wanted says only that; one that
is wanted says everything it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from hetero_llm.model import ModelFacts, PoolWish, Rejection
from hetero_llm.scheduler.cells import Cell
from hetero_llm.scheduler.resources import LABEL_PREFIX
from hetero_llm.scheduler.shapes import tp_refusal
from hetero_llm.scheduler.versions import version_conflict

Filter = Callable[[Cell, ModelFacts, PoolWish], Rejection | None]

CPU = "cpu"
"""The kind that is used only when it is asked for by name."""


def refuse(cell: Cell, rule: str, reason: str) -> Rejection:
    """Return the refusal of `cell`."""
    return Rejection(node=cell.node, kind=cell.kind, accelerator=cell.accelerator, rule=rule, reason=reason)


def refusals(cell: Cell, facts: ModelFacts, wish: PoolWish) -> tuple[Rejection, ...]:
    """Return why `cell` is out of the question; empty when its devices may be counted."""
    unwanted = _all(NOT_WANTED, cell, facts, wish)
    if unwanted:
        return unwanted[:1]
    own = tuple(
        replace(found, node=cell.node, kind=cell.kind, accelerator=cell.accelerator)
        for found in cell.rules.check(facts, cell.accelerator, wish)
    )
    # A backend that knows its device says the same as the matrix, in its own words.
    said = {found.rule for found in own}
    return (*own, *(found for found in _all(UNABLE, cell, facts, wish) if found.rule not in said))


def _all(filters: Iterable[Filter], cell: Cell, facts: ModelFacts, wish: PoolWish) -> tuple[Rejection, ...]:
    return tuple(found for rule in filters if (found := rule(cell, facts, wish)) is not None)


def _kind(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    if wish.kinds and cell.kind not in wish.kinds:
        return refuse(cell, "kind", f"{cell.kind} was not asked for, only {', '.join(wish.kinds)}")
    if not wish.kinds and cell.kind == CPU:
        return refuse(cell, "kind", "cpu is never chosen silently; ask for it with --kind cpu")
    return None


def _accelerator(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    if wish.accelerator is None or wish.accelerator == cell.accelerator:
        return None
    return refuse(cell, "kind", f"{cell.accelerator} was not asked for, only {wish.accelerator}")


def _node(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    return None if cell.alive else refuse(cell, "node", "the node does not answer")


def _label(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    for name, wanted in sorted(wish.labels.items()):
        found = cell.labels.get(name, cell.labels.get(LABEL_PREFIX + name))
        if found != wanted:
            has = f"no label {name}" if found is None else f"{name}={found}"
            return refuse(cell, "label", f"{name}={wanted} was asked for, the node has {has}")
    return None


def _version(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    conflict = None if cell.entry is None else version_conflict(cell.entry.versions, cell.versions)
    return None if conflict is None else refuse(cell, "version", conflict)


def _dtype(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    # float32 weights are served in the device's 16-bit type.
    if cell.entry is None or facts.dtype == "float32" or facts.dtype in cell.entry.dtypes:
        return None
    supported = ", ".join(cell.entry.dtypes)
    # The user's choice, as in vLLM: float16 has less range, and some models' activations leave it.
    choice = "; -- --dtype float16 converts it" if facts.dtype == "bfloat16" and "float16" in cell.entry.dtypes else ""
    return refuse(cell, "dtype", f"the model is {facts.dtype}, {cell.accelerator} computes in {supported}{choice}")


def _parallelism(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    if cell.entry is None:
        return None
    asked = {"tp": (wish.tp or 1, "tensor"), "pp": (wish.pp or 1, "pipeline")}
    for feature, (size, word) in asked.items():
        if size > 1 and feature not in cell.entry.features:
            return refuse(cell, "feature", f"{cell.accelerator} has no {word} parallelism, {feature} {size} asked for")
    return None


def _context(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    if wish.max_model_len is None or wish.max_model_len <= facts.max_model_len:
        return None
    reason = f"a context of {wish.max_model_len} tokens was asked for, the model was made for {facts.max_model_len}"
    return refuse(cell, "feature", reason)


def _heads(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    reason = None if wish.tp is None else tp_refusal(facts, wish.tp)
    return None if reason is None else refuse(cell, "heads", reason)


def _layers(cell: Cell, facts: ModelFacts, wish: PoolWish) -> Rejection | None:
    if wish.pp is None or wish.pp <= facts.layers:
        return None
    return refuse(cell, "feature", f"PP {wish.pp} needs as many layers, the model has {facts.layers}")


NOT_WANTED: tuple[Filter, ...] = (_kind, _accelerator, _label, _node)
UNABLE: tuple[Filter, ...] = (_version, _dtype, _parallelism, _context, _heads, _layers)
