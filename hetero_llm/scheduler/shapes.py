"""Which tensor- and pipeline-parallel sizes a model's shape allows, and why not the others."""

from __future__ import annotations

from hetero_llm.model import ModelFacts

# vLLM pads the vocabulary to a multiple of this before it splits it over the ranks.
_VOCAB_PADDING = 64


def tp_sizes(facts: ModelFacts, limit: int) -> tuple[int, ...]:
    """Return the TP sizes up to `limit` that the model can be split into, ascending; 1 is always one of them."""
    return tuple(tp for tp in range(1, min(limit, facts.heads) + 1) if tp_obstacle(facts, tp) is None)


def tp_obstacle(facts: ModelFacts, tp: int) -> str | None:
    """Return what cannot be split into `tp` equal parts, None when all can.

    Query heads are split; KV heads are split, or replicated when TP is a multiple of them.
    """
    if facts.heads % tp:
        return f"{facts.heads} query heads"
    if facts.kv_heads % tp and tp % facts.kv_heads:
        return f"{facts.kv_heads} KV heads"
    if facts.intermediate_size is not None and facts.intermediate_size % tp:
        return f"a feed-forward width of {facts.intermediate_size}"
    group = facts.quantization_group_size
    if facts.intermediate_size is not None and group is not None and facts.intermediate_size // tp % group:
        return f"a feed-forward width of {facts.intermediate_size} in quantisation groups of {group}"
    padded_vocab = -(-facts.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    if padded_vocab % tp:
        return f"a vocabulary of {facts.vocab_size}"
    return None


def tp_refusal(facts: ModelFacts, tp: int) -> str | None:
    """Return the sentence that refuses `tp` and names what divides, None when it can be used."""
    obstacle = tp_obstacle(facts, tp)
    if obstacle is None:
        return None
    sizes = ", ".join(str(size) for size in tp_sizes(facts, facts.heads))
    return (
        f"TP {tp} does not divide {obstacle}; the model has {facts.heads} query heads and {facts.kv_heads} KV heads, "
        f"TP can be {sizes}"
    )


def kv_note(facts: ModelFacts, tp: int) -> str | None:
    """Return how KV heads are spread where they are replicated, None where they divide."""
    if tp <= facts.kv_heads:
        return None
    return f"{facts.kv_heads} KV heads replicated {tp // facts.kv_heads} times"
