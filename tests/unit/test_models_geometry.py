import pytest

from hetero_llm.models.geometry import Geometry, read_geometry

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 256,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
}


def geometry(**more: object) -> Geometry:
    return read_geometry({**CONFIG, **more}, "config.json")


def test_latent_attention_states_its_head_size_in_two_parts():
    assert geometry(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64).head_dim == 192


@pytest.mark.parametrize("key", ["num_local_experts", "num_experts", "n_routed_experts"])
def test_experts_are_found_under_the_name_of_each_family(key: str):
    found = geometry(**{key: 8, "num_experts_per_tok": 2})
    assert (found.experts, found.active_experts) == (8, 2)


def test_a_dense_model_has_no_experts():
    assert (geometry().experts, geometry().active_experts) == (None, None)


@pytest.mark.parametrize(
    ("quantization", "bits", "group"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4, 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4, 64),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4, None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, None, 128),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4,
            32,
        ),
    ],
)
def test_bits_and_groups_are_read_from_each_method(quantization: dict[str, object], bits: int, group: int | None):
    found = geometry(quantization_config=quantization)
    assert (found.quantization_bits, found.quantization_group_size) == (bits, group)


@pytest.mark.parametrize("stated", [True, False])
def test_a_tied_embedding_is_taken_from_the_config(stated: bool):
    assert geometry(tie_word_embeddings=stated).tied is stated


def test_a_config_that_does_not_say_leaves_it_to_the_tensors():
    assert geometry().tied is None
