"""Sort a model's tensors by what tensor and pipeline parallelism do with them: split, copied, first stage, last stage.

Names follow the checkpoints of the Hugging Face hub, the treatment follows vLLM's layers: column- and row-parallel
layers are split, K and V projections at most as far as there are KV heads, norms, routers and the down-projections of
latent attention are held whole by every rank.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from hetero_llm.model import WeightShares
from hetero_llm.models.geometry import Geometry
from hetero_llm.models.tensors import Tensor

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight$")
_OUTPUT = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output_layer|output)\.")
_KV = re.compile(r"\.(?:k_proj|v_proj|wk|wv)\.")
_FUSED_QKV = re.compile(r"\.(?:qkv_proj|query_key_value|W_pack|Wqkv|c_attn)\.")
_WHOLE = re.compile(
    r"norm|\.ln_|\.(?:q_a_proj|kv_a_proj_with_mqa)\.|\.(?:gate|router|shared_expert_gate)\."
    r"|e_score_correction_bias|\.(?:o_proj|down_proj|dense|c_proj)\.bias$|g_idx$"
)
_EXPERT = re.compile(r"\.experts\.")
_VISION = re.compile(r"(?:^|\.)(?:visual|vision_tower|vision_model|vision_encoder|audio_tower)\.")

_NOT_WEIGHTS = re.compile(
    r"(?:scales?|scale_inv|zeros|qzeros|zero_point|g_idx|weight_shape|absmax|quant_map|quant_state.*)$"
)
_PACKED = {"I32": 32, "I64": 64, "U8": 8}
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def loaded(tensors: Mapping[str, Tensor], geometry: Geometry) -> dict[str, Tensor]:
    """Return the tensors that the engine loads.

    Left out are layers behind the last one, which predict further tokens (DeepSeek-V3 stores one), and an output layer
    that is stored although it is the embedding.
    """
    tied = _is_tied(tensors, geometry)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if (layer := layer_of(name)) is None or layer < geometry.layers
        if not (tied and layer is None and _OUTPUT.search(name))
    }


def layer_of(name: str) -> int | None:
    """Return the decoder layer a tensor belongs to, None when to none of them."""
    match = None if _VISION.search(name) else _LAYER.search(name)
    return int(match[1]) if match else None


def parameter_counts(tensors: Mapping[str, Tensor], geometry: Geometry) -> tuple[int, int]:
    """Return (all weights, weights one token meets); they differ where experts are chosen from."""
    total = experts = 0
    for name, tensor in tensors.items():
        count = _weights_in(name, tensor, geometry)
        total += count
        experts += count if _EXPERT.search(name) else 0
    if not geometry.experts or not geometry.active_experts:
        return total, total
    return total, total - experts + experts * geometry.active_experts // geometry.experts


def weight_shares(tensors: Mapping[str, Tensor], geometry: Geometry, element_bytes: int | None) -> WeightShares:
    """Return how the tensors (those that are `loaded`) are divided.

    Args:
        element_bytes: size the engine gives every floating-point element; None keeps each as it is stored, right for
            quantised models.
    """
    of: Counter[str] = Counter()
    layers: Counter[int] = Counter()
    for name, tensor in tensors.items():
        size = _held_bytes(tensor, element_bytes)
        layer = layer_of(name)
        if layer is None:
            of[_place(name)] += size
            continue
        layers[layer] += size
        of["kv"] += _kv_bytes(name, size, geometry)
        of["whole"] += size if _WHOLE.search(name) else 0
    return WeightShares(
        embedding_bytes=of["embedding"],
        output_bytes=of["output"],
        tied=_is_tied(tensors, geometry),
        layers_bytes=layers.total(),
        largest_layer_bytes=max(layers.values(), default=0),
        kv_bytes=of["kv"],
        whole_bytes=of["whole"],
        other_bytes=of["other"],
    )


def _is_tied(tensors: Mapping[str, Tensor], geometry: Geometry) -> bool:
    if geometry.tied is not None:
        return geometry.tied
    return not any(layer_of(name) is None and _OUTPUT.search(name) for name in tensors)


def _place(name: str) -> str:
    if _VISION.search(name):
        return "other"
    if _EMBEDDING.search(name):
        return "embedding"
    return "output" if _OUTPUT.search(name) else "other"


def _kv_bytes(name: str, size: int, geometry: Geometry) -> int:
    """Return the part of a tensor that makes K and V; latent attention has none that follows the KV heads."""
    if geometry.latent_kv_size is not None:
        return 0
    if _KV.search(name):
        return size
    if _FUSED_QKV.search(name):
        return size * 2 * geometry.kv_heads // (geometry.heads + 2 * geometry.kv_heads)
    return 0


def _held_bytes(tensor: Tensor, element_bytes: int | None) -> int:
    if element_bytes is None or tensor.dtype not in _FLOATS:
        return tensor.stored_bytes
    return tensor.elements * element_bytes


def _weights_in(name: str, tensor: Tensor, geometry: Geometry) -> int:
    """Return the weights a tensor holds: none for what only describes a quantisation, several per packed integer."""
    if geometry.quantization is None:
        return tensor.elements
    if _NOT_WEIGHTS.search(name):
        return 0
    width = _PACKED.get(tensor.dtype)
    if width is None or geometry.quantization_bits is None or geometry.quantization_bits >= width:
        return tensor.elements
    return tensor.elements * width // geometry.quantization_bits
