"""How a backend looks to the planner: a few numbers and two functions, so that plans need no plugin to be tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hetero_llm.model import ModelFacts, PoolWish, Rejection
from hetero_llm.plugin import Backend
from hetero_llm.scheduler.footprint import general_overhead_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRules:
    """What limits replicas on one kind.

    Attributes:
        native_resource: Ray resource that hands out device ids, None when devices are leased.
        check: (facts, accelerator, wish) to the kind's own refusals; their `node` is filled in by the planner.
        overhead_bytes: (facts, tp, pp) to memory each device needs beside weights and KV cache.
        block_size: tokens per KV-cache block; the engine rounds the cache down to whole blocks.
        default_kv_bytes: KV cache per device when nobody asked for a size and one full context is not larger; None
            gives the cache all memory that is left, right where the memory is the accelerator's own.
        spans_nodes: an engine of this kind can stretch over several nodes.
    """

    native_resource: str | None
    check: Callable[[ModelFacts, str, PoolWish], tuple[Rejection, ...]]
    overhead_bytes: Callable[[ModelFacts, int, int], int]
    block_size: int = 16
    default_kv_bytes: int | None = None
    spans_nodes: bool = True


def rules_of(backend: Backend) -> KindRules:
    """Return the rules of a loaded backend."""
    return KindRules(
        native_resource=backend.native_resource,
        check=backend.check_model,
        overhead_bytes=backend.overhead_bytes,
        block_size=backend.kv_block_tokens,
        default_kv_bytes=backend.kv_default_bytes,
        spans_nodes=backend.spans_nodes,
    )


def asked_once(rules: KindRules) -> KindRules:
    """Return the same rules for one plan, whose `check` is called once per accelerator however many nodes have it."""
    answers: dict[tuple[str, int, int], tuple[Rejection, ...]] = {}

    def check(facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        key = (accelerator, id(facts), id(wish))
        if key not in answers:
            kept.append((facts, wish))
            answers[key] = rules.check(facts, accelerator, wish)
        return answers[key]

    # Kept alive so that no other object gets the id of one that was asked about.
    kept: list[tuple[ModelFacts, PoolWish]] = []
    return replace(rules, check=check)


def _accept(facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
    return ()


UNKNOWN_KIND = KindRules(native_resource=None, check=_accept, overhead_bytes=general_overhead_bytes)
"""For an inventory of another machine that has a kind nobody here knows: memory, heads and counts still decide."""
