import dataclasses

import pytest

from hetero_llm.matrix import parse_matrix
from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.estimate import roofline

SMOLLM2 = ALIASES["smollm2-135m"].facts
(ENTRY,) = parse_matrix("""
schema: 1
accelerators:
  - {kind: cuda, accelerator: X, vendor: V, memory_bandwidth_bytes_per_s: 1_000_000_000_000,
     bf16_flops: 2_000_000_000_000, collective: nccl, dtypes: [bfloat16], features: [tp],
     evidence: [{source: this test, date: 2026-12-01, level: reported}]}
""").entries


def test_decoding_is_bounded_by_reading_the_weights_and_prefill_by_arithmetic():
    speed = roofline(SMOLLM2, 1, 1, ENTRY)
    assert speed is not None
    assert speed.decode_tokens_per_s == pytest.approx(1e12 / 269_030_016, rel=1e-3)
    assert speed.prefill_tokens_per_s == pytest.approx(2e12 / (2 * 134_515_008), rel=1e-3)


def test_of_a_mixture_of_experts_only_the_part_a_token_meets_counts():
    quarter = dataclasses.replace(SMOLLM2, active_parameters=SMOLLM2.parameters // 4)
    whole, part = roofline(SMOLLM2, 1, 1, ENTRY), roofline(quarter, 1, 1, ENTRY)
    assert whole is not None
    assert part is not None
    assert part.decode_tokens_per_s == pytest.approx(4 * whole.decode_tokens_per_s, rel=1e-3)
    assert part.prefill_tokens_per_s == pytest.approx(4 * whole.prefill_tokens_per_s, rel=1e-3)


def test_what_the_matrix_does_not_know_is_not_estimated():
    assert roofline(SMOLLM2, 1, 1, None) is None
