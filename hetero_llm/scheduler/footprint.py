"""How much memory a model takes on each device of a group. Formulas follow vLLM's own accounting.

* TP splits a layer's tensors evenly, but for K and V projections, which are split over at most as many ranks as there
  are KV heads, and for norms, routers and the down-projections of latent attention, which every rank holds whole.
* PP gives each stage whole layers. The embedding stands on the first stage, the output layer on the last.
* One token's KV cache is K and V of every layer of the stage, for this rank's KV heads (at least one: with more ranks
  than KV heads, heads are replicated). Latent attention (MLA) caches one vector per layer instead, on every rank.
* The engine allocates whole blocks of `block_size` tokens.
"""

from __future__ import annotations

from hetero_llm.model import MemoryEstimate, ModelFacts, WeightShares

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
_SERVED_ELEMENT_BYTES = 2
_KV_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "int8": 1}

# What vLLM schedules at most in one step on a large device, and the sequences it samples for; profiling is done there.
_STEP_TOKENS = 8192
_STEP_SEQUENCES = 256
_RUNTIME_BYTES = 1 << 30


def served_weights_bytes(facts: ModelFacts) -> int:
    """Return the bytes of all weights as the engine holds them: float32 becomes 16-bit, quantised stays as stored."""
    if facts.quantization is None and facts.dtype == "float32":
        return facts.parameters * _SERVED_ELEMENT_BYTES
    return facts.weights_bytes


def weights_bytes_per_device(facts: ModelFacts, tp: int, pp: int) -> int:
    """Return the bytes of weights on the fullest device of a tp x pp group."""
    shares = facts.weights or _shares_of_geometry(facts)
    if pp == 1:
        edge_bytes = shares.embedding_bytes + shares.other_bytes + shares.output_bytes
        return _split(edge_bytes, tp) + _layers_bytes(facts, shares, tp, facts.layers)
    stages = partition(facts.layers, pp)
    output_bytes = shares.embedding_bytes if shares.tied else shares.output_bytes
    edges = [shares.embedding_bytes + shares.other_bytes, *[0] * (pp - 2), output_bytes]
    # Middle stages are alike but for one layer more or less, so few of many stages are different.
    return max(
        _split(edge_bytes, tp) + _layers_bytes(facts, shares, tp, layers)
        for edge_bytes, layers in set(zip(edges, stages, strict=True))
    )


def partition(layers: int, pp: int) -> tuple[int, ...]:
    """Return the layers of each pipeline stage, as vLLM's `get_pp_indices`: what does not divide goes to the middle."""
    sizes = [layers // pp] * pp
    for stage in range(2, layers % pp + 2):
        sizes[-stage] += 1
    return tuple(sizes)


def stage_layers(facts: ModelFacts, pp: int) -> int:
    """Return the layers of the fullest pipeline stage."""
    return -(-facts.layers // pp)


def kv_bytes_per_token(facts: ModelFacts, tp: int, pp: int = 1, kv_dtype: str | None = None) -> int:
    """Return the KV cache one token takes on each device; `kv_dtype` as in `PoolWish.kv_cache_dtype`."""
    if facts.latent_kv_size is not None:
        elements = facts.latent_kv_size
    else:
        elements = 2 * max(1, facts.kv_heads // tp) * facts.head_dim
    return stage_layers(facts, pp) * elements * _kv_element_bytes(kv_dtype)


def kv_block_bytes(facts: ModelFacts, tp: int, pp: int, block_size: int, kv_dtype: str | None = None) -> int:
    """Return the KV cache that one block of `block_size` tokens takes on each device."""
    return kv_bytes_per_token(facts, tp, pp, kv_dtype) * block_size


def kv_tokens(facts: ModelFacts, tp: int, pp: int, kv_bytes: int, block_size: int, kv_dtype: str | None = None) -> int:
    """Return how many tokens `kv_bytes` per device hold, in whole blocks."""
    return kv_bytes // kv_block_bytes(facts, tp, pp, block_size, kv_dtype) * block_size


def context_bytes(
    facts: ModelFacts, tp: int, pp: int, tokens: int, block_size: int, kv_dtype: str | None = None
) -> int:
    """Return the KV cache per device that one sequence of `tokens` tokens needs, in whole blocks."""
    return -(-tokens // block_size) * kv_block_bytes(facts, tp, pp, block_size, kv_dtype)


def memory_estimate(facts: ModelFacts, tp: int, pp: int, kv_bytes: int, overhead_bytes: int) -> MemoryEstimate:
    """Return what each device of the group holds, given its KV cache and its overhead."""
    weights_bytes = weights_bytes_per_device(facts, tp, pp)
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        overhead_bytes=overhead_bytes,
        per_device_bytes=weights_bytes + kv_bytes + overhead_bytes,
    )


def general_overhead_bytes(facts: ModelFacts, tp: int, pp: int) -> int:
    """Return a careful guess of what an accelerator needs beside weights and cache, for a kind nobody here knows.

    One step's activations in 16 bits (both feed-forward halves of this rank and three residual streams), logits in 32
    bits, and a gibibyte for the runtime: context, collectives, captured graphs.
    """
    width = facts.intermediate_size or 4 * facts.hidden_size
    activations = _STEP_TOKENS * (2 * _split(width, tp) + 3 * facts.hidden_size) * _SERVED_ELEMENT_BYTES
    logits = _STEP_SEQUENCES * facts.vocab_size * 4
    return _RUNTIME_BYTES + activations + logits


def _layers_bytes(facts: ModelFacts, shares: WeightShares, tp: int, layers: int) -> int:
    """Return this rank's bytes of a stage of `layers` layers, the largest there are."""
    stage_bytes = min(shares.layers_bytes, layers * shares.largest_layer_bytes)
    whole = _part(shares.whole_bytes, stage_bytes, shares.layers_bytes)
    kv = _part(shares.kv_bytes, stage_bytes, shares.layers_bytes)
    return whole + _split(kv, min(tp, facts.kv_heads)) + _split(stage_bytes - whole - kv, tp)


def _part(size: int, of: int, total: int) -> int:
    return size * of // total if total else 0


def _split(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _kv_element_bytes(kv_dtype: str | None) -> int:
    if kv_dtype is None or kv_dtype == "auto":
        return _SERVED_ELEMENT_BYTES
    return 1 if kv_dtype.startswith("fp8") else _KV_ELEMENT_BYTES.get(kv_dtype, _SERVED_ELEMENT_BYTES)


def _shares_of_geometry(facts: ModelFacts) -> WeightShares:
    """Guess the shares of a model whose tensors were not looked at: equal layers, embedding at both ends."""
    element_bytes = min(_DTYPE_BYTES.get(facts.dtype, 2), _SERVED_ELEMENT_BYTES)
    total = served_weights_bytes(facts)
    embedding = min(facts.vocab_size * facts.hidden_size * element_bytes, total)
    layers = total - embedding
    projections = 2 * facts.kv_heads * facts.head_dim * facts.hidden_size * facts.layers * element_bytes
    return WeightShares(
        embedding_bytes=embedding,
        output_bytes=0,
        tied=True,
        layers_bytes=layers,
        largest_layer_bytes=-(-layers // facts.layers),
        kv_bytes=0 if facts.latent_kv_size is not None else min(projections, layers),
        whole_bytes=0,
        other_bytes=0,
    )
