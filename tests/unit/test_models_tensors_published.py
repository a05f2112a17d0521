"""Sizes of well-known models, from their shapes, against published figures (tests/samples/models/README.md)."""

import pytest
from checkpoint_headers import config_of, tensor, tensors_of

from hetero_llm.model import ModelFacts
from hetero_llm.models.facts import facts_of_tensors
from hetero_llm.models.geometry import read_geometry
from hetero_llm.scheduler.footprint import kv_bytes_per_token, weights_bytes_per_device

GIB = 1 << 30
BILLION = 1_000_000_000


def facts_of(name: str) -> ModelFacts:
    return facts_of_tensors(read_geometry(config_of(name), f"{name}/config.json"), tensors_of(name), name, name)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen2.5-7b", 7.61),
        ("qwen2.5-14b", 14.7),
        ("qwen2.5-72b", 72.7),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.6),
        ("llama-3.1-405b", 406),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671),
    ],
)
def test_the_number_of_weights_is_the_published_one(name: str, billions: float):
    assert facts_of(name).parameters / BILLION == pytest.approx(billions, rel=0.006)


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37)])
def test_one_token_meets_the_published_part_of_a_mixture_of_experts(name: str, billions: float):
    active = facts_of(name).active_parameters
    assert active is not None
    assert active / BILLION == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize(
    ("name", "size_bytes"), [("deepseek-v3", 70_272), ("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096)]
)
def test_a_tokens_cache_takes_the_published_bytes(name: str, size_bytes: int):
    assert kv_bytes_per_token(facts_of(name), tp=1) == size_bytes


@pytest.mark.parametrize(
    ("name", "tp", "gib"),
    [
        ("qwen2.5-7b", 1, 14.2488),
        ("qwen2.5-14b", 2, 13.9476),
        ("llama-3.1-70b", 8, 16.4610),
        ("llama-3.1-8b", 4, 3.7418),
    ],
)
def test_a_rank_holds_what_vllm_logged(name: str, tp: int, gib: float):
    assert weights_bytes_per_device(facts_of(name), tp, 1) / GIB == pytest.approx(gib, rel=0.02)


def test_latent_attention_caches_the_same_on_every_rank():
    facts = facts_of("deepseek-v3")
    assert facts.head_dim == 192
    assert kv_bytes_per_token(facts, tp=16) == 70_272


def test_fp8_weights_stay_as_they_are_stored():
    facts = facts_of("deepseek-v3")
    assert facts.weights is not None
    assert weights_bytes_per_device(facts, 1, 1) / BILLION == pytest.approx(671 * 1.003, rel=0.01)


def test_the_layer_that_predicts_further_tokens_is_stored_but_not_loaded():
    facts = facts_of("deepseek-v3")
    assert facts.weights_bytes > weights_bytes_per_device(facts, 1, 1) + 11 * BILLION


def test_routers_norms_and_latent_down_projections_are_whole_on_every_rank():
    facts = facts_of("deepseek-v3")
    assert facts.weights is not None
    per_layer = 7168 * (1536 + 512 + 64) + 2 * (2 * 7168 + 1536 + 512)
    router = 2 * 256 * 7168 + 4 * 256
    scales = 4 * (12 * 56 + 5 * 56)
    assert facts.weights.whole_bytes == 61 * (per_layer + scales) + 58 * router


def test_dense_layers_among_expert_layers_do_not_make_a_stage_look_small():
    facts = facts_of("deepseek-v3")
    assert facts.weights is not None
    mean_bytes = facts.weights.layers_bytes // 61
    assert facts.weights.largest_layer_bytes > 1.03 * mean_bytes
    assert weights_bytes_per_device(facts, 1, 2) >= 31 * facts.weights.largest_layer_bytes


def test_kv_projections_are_told_from_the_rest():
    facts = facts_of("llama-3.1-8b")
    assert facts.weights is not None
    assert facts.weights.kv_bytes == 32 * 2 * 2 * 4096 * 1024


def test_packed_weights_are_counted_one_by_one():
    config = config_of("llama-3.1-8b") | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    tensors = {
        "model.layers.0.mlp.up_proj.qweight": tensor("I32", 4096, 14_336 // 8),
        "model.layers.0.mlp.up_proj.qzeros": tensor("I32", 32, 14_336 // 8),
        "model.layers.0.mlp.up_proj.scales": tensor("F16", 32, 14_336),
    }
    facts = facts_of_tensors(read_geometry(config, "config.json"), tensors, "m", "m")
    assert facts.parameters == 4096 * 14_336
    assert facts.quantization_group_size == 128
    assert facts.weights is not None
    assert facts.weights.layers_bytes == facts.weights_bytes


def test_an_output_layer_that_is_stored_although_it_is_tied_is_not_loaded():
    config = config_of("llama-3.1-8b") | {"tie_word_embeddings": True}
    stored = tensors_of("llama-3.1-8b")
    facts = facts_of_tensors(read_geometry(config, "config.json"), stored, "m", "m")
    assert facts.parameters == 8_030_261_248 - 128_256 * 4096
    assert facts.weights is not None
    assert (facts.weights.tied, facts.weights.output_bytes) == (True, 0)


def test_float32_weights_are_planned_in_the_16_bits_they_are_served_in():
    config = config_of("llama-3.1-8b") | {"torch_dtype": "float32"}
    tensors = {"model.layers.0.mlp.up_proj.weight": tensor("F32", 14_336, 4096)}
    facts = facts_of_tensors(read_geometry(config, "config.json"), tensors, "m", "m")
    assert facts.weights is not None
    assert facts.weights.layers_bytes == 2 * 14_336 * 4096
    assert facts.weights_bytes == 4 * 14_336 * 4096
