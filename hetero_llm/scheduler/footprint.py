"""How much memory a model takes on each device of a group. Formulas follow vLLM's own accounting.

* Weights split evenly over TP ranks and pipeline stages; the embedding stands on the first stage and, as output layer,
  on the last.
* One token's KV cache is K and V of every layer of the stage, for this rank's KV heads (at least one: with more ranks
  than KV heads, heads are replicated). Latent attention (MLA) caches one vector per layer instead, on every rank.
* The engine allocates whole blocks of `block_size` tokens.
"""

from __future__ import annotations

from hetero_llm.model import MemoryEstimate, ModelFacts

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}

# float32 models are served in the device's 16-bit type, and every other type's cache is 16 bits unless asked otherwise.
_KV_ELEMENT_BYTES = 2


def weights_bytes_per_device(facts: ModelFacts, tp: int, pp: int) -> int:
    """Return the bytes of weights on the fullest device of a tp x pp group."""
    stage_bytes = facts.weights_bytes
    if pp > 1:
        embedding_bytes = facts.vocab_size * facts.hidden_size * _DTYPE_BYTES.get(facts.dtype, 2)
        embedding_bytes = min(embedding_bytes, facts.weights_bytes)
        body_bytes = facts.weights_bytes - embedding_bytes
        stage_bytes = embedding_bytes + body_bytes * stage_layers(facts, pp) // facts.layers
    return -(-stage_bytes // tp)


def stage_layers(facts: ModelFacts, pp: int) -> int:
    """Return the layers of the fullest pipeline stage."""
    return -(-facts.layers // pp)


def kv_bytes_per_token(facts: ModelFacts, tp: int, pp: int = 1) -> int:
    """Return the KV cache one token takes on each device."""
    if facts.latent_kv_size is not None:
        elements = facts.latent_kv_size
    else:
        elements = 2 * max(1, facts.kv_heads // tp) * facts.head_dim
    return stage_layers(facts, pp) * elements * _KV_ELEMENT_BYTES


def kv_block_bytes(facts: ModelFacts, tp: int, pp: int, block_size: int) -> int:
    """Return the KV cache that one block of `block_size` tokens takes on each device."""
    return kv_bytes_per_token(facts, tp, pp) * block_size


def kv_tokens(facts: ModelFacts, tp: int, pp: int, kv_bytes: int, block_size: int) -> int:
    """Return how many tokens `kv_bytes` per device hold, in whole blocks."""
    return kv_bytes // kv_block_bytes(facts, tp, pp, block_size) * block_size


def context_bytes(facts: ModelFacts, tp: int, pp: int, tokens: int, block_size: int) -> int:
    """Return the KV cache per device that one sequence of `tokens` tokens needs, in whole blocks."""
    return -(-tokens // block_size) * kv_block_bytes(facts, tp, pp, block_size)


def memory_estimate(facts: ModelFacts, tp: int, pp: int, kv_bytes: int, overhead_bytes: int) -> MemoryEstimate:
    """Return what each device of the group holds, given its KV cache and its overhead."""
    weights_bytes = weights_bytes_per_device(facts, tp, pp)
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        overhead_bytes=overhead_bytes,
        per_device_bytes=weights_bytes + kv_bytes + overhead_bytes,
    )
