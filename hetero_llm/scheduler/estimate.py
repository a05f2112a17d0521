"""First guess of a replica's speed from the hardware matrix: a roofline, so an upper bound.

Decoding one sequence reads every weight that a token meets: memory bandwidth over weights. Pre-fill is arithmetic: two
operations per weight and token (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1). Of a
mixture of experts a token meets a part.
"""

from __future__ import annotations

from hetero_llm.matrix import AcceleratorEntry
from hetero_llm.model import ModelFacts, SpeedEstimate
from hetero_llm.scheduler.footprint import served_weights_bytes

SOURCE_MATRIX = "matrix"


def roofline(facts: ModelFacts, tp: int, pp: int, entry: AcceleratorEntry | None) -> SpeedEstimate | None:
    """Return the bound for a tp x pp group, None when the matrix knows neither bandwidth nor arithmetic rate."""
    if entry is None:
        return None
    flops = _flops(facts, entry)
    bandwidth = entry.memory_bandwidth_bytes_per_s
    if flops is None and bandwidth is None:
        return None
    active = facts.active_parameters or facts.parameters
    active_bytes = served_weights_bytes(facts) * active / facts.parameters
    return SpeedEstimate(
        # Stages work in turn on one sequence, but at once on several: PP helps pre-fill only.
        prefill_tokens_per_s=None if flops is None else round(flops * tp * pp / (2 * active), 1),
        decode_tokens_per_s=None if bandwidth is None else round(bandwidth * tp / active_bytes, 1),
        source=SOURCE_MATRIX,
    )


def _flops(facts: ModelFacts, entry: AcceleratorEntry) -> int | None:
    if facts.dtype.startswith("float8"):
        return entry.fp8_flops
    return entry.fp16_flops if facts.dtype == "float16" else entry.bf16_flops
