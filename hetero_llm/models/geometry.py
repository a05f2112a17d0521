"""Read a model's shape from its config.json: layers, heads, context length. No weights are looked at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.errors import ModelFolderInvalid

# One list per fact: architectures name the same number differently. The order is vLLM's order of trust.
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_VOCAB = ("vocab_size", "padded_vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE_EXPERTS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)

# Types of rope scaling whose config states the context already scaled (vLLM's `_get_and_verify_max_len`).
_ROPE_ALREADY_SCALED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """A model's shape; fields as in `hetero_llm.model.ModelFacts`, and some that only tell how to count its tensors.

    Attributes:
        dtype: None when the config names none.
        quantization_bits: bits of a packed weight, 4 for most; None when weights are not packed.
        experts: routed experts of a layer, None for a dense model.
        active_experts: how many of them one token meets.
        tied: output layer and embedding are one tensor; None when the config does not say.
    """

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int | None
    latent_kv_size: int | None
    vocab_size: int
    max_model_len: int
    dtype: str | None
    quantization: str | None
    quantization_bits: int | None = None
    quantization_group_size: int | None = None
    experts: int | None = None
    active_experts: int | None = None
    tied: bool | None = None


def read_geometry(config: Mapping[str, Any], where: str, tokenizer_limit: int | None = None) -> Geometry:
    """Return the shape that `config` (the content of a config.json) describes.

    Args:
        where: the file's path, for messages.
        tokenizer_limit: ``model_max_length`` of tokenizer_config.json; the engine takes the smaller of the two.

    Raises:
        ModelFolderInvalid: a number that every language model has is missing or not a positive integer.
    """
    # Multimodal configs nest the language model; the outer level names the architecture.
    text = {**config, **_mapping(config.get("text_config"))}
    heads = _required(text, _HEADS, where)
    hidden = _required(text, _HIDDEN, where)
    quantization = _mapping(config.get("quantization_config") or text.get("quantization_config"))
    tied = text.get("tie_word_embeddings")
    return Geometry(
        architecture=_architecture(config, where),
        layers=_required(text, _LAYERS, where),
        heads=heads,
        kv_heads=_optional(text, _KV_HEADS) or heads,
        head_dim=_head_dim(text) or hidden // heads,
        hidden_size=hidden,
        intermediate_size=_optional(text, ("intermediate_size", "n_inner", "ffn_dim")),
        latent_kv_size=_latent_kv_size(text),
        vocab_size=_required(text, _VOCAB, where),
        max_model_len=_max_model_len(text, where, tokenizer_limit),
        dtype=_dtype(text),
        quantization=str(quantization.get("quant_method", "unknown")) if quantization else None,
        quantization_bits=_quantization_bits(quantization),
        quantization_group_size=_quantization_group_size(quantization),
        experts=_optional(text, _EXPERTS),
        active_experts=_optional(text, _ACTIVE_EXPERTS),
        tied=tied if isinstance(tied, bool) else None,
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise ModelFolderInvalid(
        f"{where} names no architecture",
        cause="the key `architectures` is missing or empty, so the engine cannot know which model this is",
        next=("use the config.json that came with the model",),
    )


def _optional(config: Mapping[str, Any], keys: Iterable[str]) -> int | None:
    for key in keys:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _required(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> int:
    value = _optional(config, keys)
    if value is not None:
        return value
    written = next((config[key] for key in keys if key in config), None)
    seen = "it is missing" if written is None else f"it is {written!r}"
    raise ModelFolderInvalid(
        f"{where} has no usable `{keys[0]}`",
        cause=f"a positive whole number is needed; {seen} (also looked for: {', '.join(keys[1:])})",
        next=("use the config.json that came with the model",),
    )


def _latent_kv_size(config: Mapping[str, Any]) -> int | None:
    """Elements per token and layer that multi-head latent attention caches, once for all heads; None without it."""
    rank = _optional(config, ("kv_lora_rank",))
    return None if rank is None else rank + (_optional(config, ("qk_rope_head_dim",)) or 0)


def _max_model_len(config: Mapping[str, Any], where: str, tokenizer_limit: int | None) -> int:
    stated = [config[key] for key in _CONTEXT if isinstance(config.get(key), int) and config[key] > 0]
    if not stated:
        _required(config, _CONTEXT, where)
    limit = min(stated)
    if tokenizer_limit is not None and tokenizer_limit > 0:
        limit = min(limit, tokenizer_limit)
    return int(limit * _rope_factor(config))


def _rope_factor(config: Mapping[str, Any]) -> float:
    rope = _mapping(config.get("rope_parameters")) or _mapping(config.get("rope_scaling"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    factor = rope.get("factor")
    if kind in _ROPE_ALREADY_SCALED or kind == "default" or "gemma3" in str(config.get("model_type", "")):
        return 1.0
    return float(factor) if isinstance(factor, int | float) and factor > 0 else 1.0


def _dtype(config: Mapping[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _head_dim(config: Mapping[str, Any]) -> int | None:
    """Elements per query head as stated; latent attention states it in two parts, without and with position."""
    latent = _optional(config, ("qk_nope_head_dim",))
    if latent is not None:
        return latent + (_optional(config, ("qk_rope_head_dim",)) or 0)
    return _optional(config, ("head_dim",))


def _quantization_bits(quantization: Mapping[str, Any]) -> int | None:
    """Bits of a weight that is packed into larger integers: GPTQ, AWQ, bitsandbytes, compressed-tensors."""
    if quantization.get("load_in_4bit") is True:
        return 4
    return _optional(quantization, ("bits", "w_bit")) or _optional(_weight_scheme(quantization), ("num_bits",))


def _quantization_group_size(quantization: Mapping[str, Any]) -> int | None:
    block = quantization.get("weight_block_size")
    if isinstance(block, list) and block and isinstance(block[0], int):
        return block[0]
    group = _optional(quantization, ("group_size", "q_group_size"))
    return group or _optional(_weight_scheme(quantization), ("group_size",))


def _weight_scheme(quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first scheme of compressed-tensors' ``config_groups``."""
    for group in _mapping(quantization.get("config_groups")).values():
        return _mapping(_mapping(group).get("weights"))
    return {}
