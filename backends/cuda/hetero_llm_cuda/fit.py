"""Which models a chip can run, and what an engine needs of its memory beside weights and KV cache."""

from __future__ import annotations

from hetero_llm.plugin import ModelFacts, PoolWish
from hetero_llm_cuda.names import compute_capability

LEAST_CAPABILITY = (7, 0)
"""What vLLM asks of a GPU at least (its installation guide for NVIDIA CUDA)."""

BFLOAT16_CAPABILITY = (8, 0)

QUANTIZATIONS = {
    "awq": (7, 5),
    "experts_int8": (8, 0),
    "fbgemm_fp8": (8, 0),
    "fp8": (7, 5),
    "fp_quant": (10, 0),
    "gptq": (6, 0),
    "humming": (7, 5),
    "modelopt": (8, 0),
    "modelopt_fp4": (7, 5),
    "moe_wna16": (7, 0),
    "mxfp4": (8, 0),
    "torchao": (7, 5),
}
"""Least compute capability per quantisation method, as each method's `get_min_capability` in vllm 0.32.0 says. Methods
that are not listed decide by their details and are left to the engine. Below 8.9 fp8 weights are unpacked into wider
kernels: less memory, no more speed."""

FP8_DTYPE_CAPABILITY = (8, 9)
_FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2")

_MIB = 1 << 20
CONTEXT_BYTES = 600 * _MIB
GRAPH_BYTES = 1024 * _MIB
NCCL_BYTES = 512 * _MIB
BATCHED_TOKENS = 8192
BATCHED_REQUESTS = 256
_ACTIVATION_BYTES = 2
_LOGIT_BYTES = 4
_HIDDEN_COPIES = 4


def objections(facts: ModelFacts, accelerator: str, wish: PoolWish) -> list[tuple[str, str]]:
    """Return (rule, reason) for each thing that keeps a model from an accelerator; nothing for an unknown chip."""
    found: list[tuple[str, str]] = []
    ranks = (wish.tp or 1) * (wish.pp or 1)
    if "-MIG-" in accelerator and ranks > 1:
        found.append(("feature", f"{ranks} ranks; MIG instances cannot reach each other, only one rank fits on one"))
    capability = compute_capability(accelerator)
    if capability is None:
        return found
    has = f"{accelerator} has compute capability {_text(capability)}"
    if capability < LEAST_CAPABILITY:
        return [*found, ("feature", f"{has}; vLLM needs {_text(LEAST_CAPABILITY)}")]
    for what, rule, least in _needs(facts):
        if capability < least:
            found.append((rule, f"{has}; {what} needs {_text(least)}"))
    return found


def overhead_bytes(facts: ModelFacts, tp: int, pp: int) -> int:
    """Return an estimate of what one rank takes beside weights and KV cache.

    CUDA context and libraries, captured graphs, NCCL's buffers where there are several ranks, and the largest step
    vLLM tries at its start: `BATCHED_TOKENS` tokens through one layer and logits of `BATCHED_REQUESTS`. The sizes are
    vLLM's defaults for serving and orders of magnitude from its profiling logs; not measured by us on any card.
    """
    width = _HIDDEN_COPIES * facts.hidden_size + 2 * (facts.intermediate_size or 4 * facts.hidden_size) // tp
    activations = BATCHED_TOKENS * width * _ACTIVATION_BYTES
    logits = BATCHED_REQUESTS * facts.vocab_size * _LOGIT_BYTES
    return CONTEXT_BYTES + GRAPH_BYTES + activations + logits + (NCCL_BYTES if tp * pp > 1 else 0)


def _needs(facts: ModelFacts) -> list[tuple[str, str, tuple[int, int]]]:
    """Return (what, rule, least capability) of the model's dtype and quantisation."""
    needs: list[tuple[str, str, tuple[int, int]]] = []
    if facts.dtype == "bfloat16":
        needs.append(("bfloat16", "dtype", BFLOAT16_CAPABILITY))
    if facts.dtype in _FP8_DTYPES:
        needs.append((facts.dtype, "dtype", FP8_DTYPE_CAPABILITY))
    if facts.quantization in QUANTIZATIONS:
        needs.append((f"quantisation {facts.quantization}", "dtype", QUANTIZATIONS[facts.quantization]))
    return needs


def _text(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
