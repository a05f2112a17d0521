"""Safetensors headers of well-known models, composed from their shapes: real names and shapes, no data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_llm.models.tensors import Tensor

SHAPES = Path(__file__).parent.parent / "samples" / "models"

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4}


def config_of(name: str) -> dict[str, Any]:
    """Return the facts of a published config.json."""
    config: dict[str, Any] = json.loads((SHAPES / f"{name}.json").read_text())
    return config


def tensors_of(name: str) -> dict[str, Tensor]:
    """Return all tensors of a model of tests/samples/models."""
    config = config_of(name)
    if "kv_lora_rank" in config:
        return dict(_deepseek(config))
    return dict(_dense(config))


def tensor(dtype: str, *shape: int) -> Tensor:
    """Return a tensor of this type and shape."""
    return Tensor(dtype=dtype, shape=shape, stored_bytes=math.prod(shape) * _BYTES[dtype])


def _dense(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Llama, Qwen2 (with biases) and Mixtral (with experts)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = hidden // heads
    kv = config["num_key_value_heads"] * head_dim
    yield from _ends(config)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        yield stem + "input_layernorm.weight", tensor("BF16", hidden)
        yield stem + "post_attention_layernorm.weight", tensor("BF16", hidden)
        for name, width in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            yield f"{stem}self_attn.{name}.weight", tensor("BF16", width, hidden)
            if config["architectures"] == ["Qwen2ForCausalLM"]:
                yield f"{stem}self_attn.{name}.bias", tensor("BF16", width)
        yield stem + "self_attn.o_proj.weight", tensor("BF16", hidden, hidden)
        yield from _feed_forward(stem, config)


def _feed_forward(stem: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, width = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_local_experts")
    if experts is None:
        yield from _mlp(stem + "mlp.", "BF16", hidden, width)
        return
    yield stem + "block_sparse_moe.gate.weight", tensor("BF16", experts, hidden)
    for expert in range(experts):
        for name, shape in (("w1", (width, hidden)), ("w2", (hidden, width)), ("w3", (width, hidden))):
            yield f"{stem}block_sparse_moe.experts.{expert}.{name}.weight", tensor("BF16", *shape)


def _mlp(stem: str, dtype: str, hidden: int, width: int) -> Iterator[tuple[str, Tensor]]:
    for name, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        yield f"{stem}{name}.weight", tensor(dtype, *shape)
        if dtype == "F8_E4M3":
            yield f"{stem}{name}.weight_scale_inv", tensor("F32", *(-(-side // 128) for side in shape))


def _ends(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", tensor("BF16", vocab, hidden)
    yield "model.norm.weight", tensor("BF16", hidden)
    yield "lm_head.weight", tensor("BF16", vocab, hidden)


def _deepseek(config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """DeepSeek-V3: latent attention, a few dense layers, then experts; one more layer that predicts further tokens."""
    yield from _ends(config)
    layers = config["num_hidden_layers"]
    for layer in range(layers + config["num_nextn_predict_layers"]):
        stem = f"model.layers.{layer}."
        yield from _latent_attention(stem, config)
        if layer < config["first_k_dense_replace"]:
            yield from _mlp(stem + "mlp.", "F8_E4M3", config["hidden_size"], config["intermediate_size"])
        else:
            yield from _experts(stem, config)
    hidden, stem = config["hidden_size"], f"model.layers.{layers}."
    yield stem + "embed_tokens.weight", tensor("BF16", config["vocab_size"], hidden)
    yield stem + "shared_head.head.weight", tensor("BF16", config["vocab_size"], hidden)
    yield stem + "eh_proj.weight", tensor("BF16", hidden, 2 * hidden)


def _latent_attention(stem: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank_q, rank_kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    yield stem + "input_layernorm.weight", tensor("BF16", hidden)
    yield stem + "post_attention_layernorm.weight", tensor("BF16", hidden)
    yield stem + "self_attn.q_a_layernorm.weight", tensor("BF16", rank_q)
    yield stem + "self_attn.kv_a_layernorm.weight", tensor("BF16", rank_kv)
    for name, shape in (
        ("q_a_proj", (rank_q, hidden)),
        ("q_b_proj", (heads * (nope + rope), rank_q)),
        ("kv_a_proj_with_mqa", (rank_kv + rope, hidden)),
        ("kv_b_proj", (heads * (nope + value), rank_kv)),
        ("o_proj", (hidden, heads * value)),
    ):
        yield f"{stem}self_attn.{name}.weight", tensor("F8_E4M3", *shape)
        yield f"{stem}self_attn.{name}.weight_scale_inv", tensor("F32", *(-(-side // 128) for side in shape))


def _experts(stem: str, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield stem + "mlp.gate.weight", tensor("BF16", experts, hidden)
    yield stem + "mlp.gate.e_score_correction_bias", tensor("F32", experts)
    yield from _mlp(stem + "mlp.shared_experts.", "F8_E4M3", hidden, width * config["n_shared_experts"])
    for expert in range(experts):
        yield from _mlp(f"{stem}mlp.experts.{expert}.", "F8_E4M3", hidden, width)
