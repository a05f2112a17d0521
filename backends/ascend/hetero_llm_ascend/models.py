"""Which models run on which Ascend part, and in which number format: the rules of vllm-ascend 0.23."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hetero_llm.plugin import ModelFacts, PoolWish

MODELSLIM = "ascend"
"""Quantisation by the vendor's tool (W8A8 and others); its folders have `DESCRIPTION`, and no word in config.json."""

DESCRIPTION = "quant_model_description.json"
_FIRST_GENERATION = re.compile(r"910(?:A|B|Pro[AB]|PremiumA|PRO[AB])?")
"""910A, 910ProB and so on. 910B1 to 910B4 and 910_93xx are later parts; a bare 910 is of unknown generation."""

RUNTIME_BYTES = 1_500_000_000
"""torch_npu's context and captured graphs. The 2.9 to 3.4 GB in use on an idle device are the driver's, never free."""

COLLECTIVE_BYTES = 800_000_000
"""HCCL's buffers of a rank: HCCL_BUFFSIZE is 200 MiB per direction and communicator by default, for two of them."""

_STEP_TOKENS = 8192
_STEP_SEQUENCES = 256
_QUANTIZATIONS = (MODELSLIM, "compressed-tensors")


def is_310p(accelerator: str) -> bool:
    """Return whether the part computes in float16 only, without graphs and pipelines."""
    return accelerator.startswith("310P")


def is_950(accelerator: str) -> bool:
    """Return whether the part has fp8."""
    return accelerator.startswith("950")


def is_first_generation(accelerator: str) -> bool:
    """Return whether the part is a 910 of the first generation, for which there is no vllm-ascend."""
    return accelerator != "910" and _FIRST_GENERATION.fullmatch(accelerator) is not None


def objections(facts: ModelFacts, accelerator: str, wish: PoolWish) -> list[tuple[str, str]]:
    """Return (rule, reason) for everything that keeps the model from running on the part."""
    if is_first_generation(accelerator):
        reason = f"{accelerator} is a 910 of the first generation: no bfloat16, and vllm-ascend has no kernels for it"
        return [("feature", reason)]
    quantization = quantization_of(facts.path, facts.quantization)
    return [
        *_pipeline_objections(accelerator, wish),
        *_dtype_objections(facts, accelerator, quantization),
        *_quantization_objections(accelerator, quantization),
    ]


def quantization_of(folder: str | None, stated: str | None) -> str | None:
    """Return the quantisation method of a model: config.json's word, else ``ascend`` when the tool's file is there."""
    if stated is not None:
        return stated
    return MODELSLIM if folder is not None and Path(folder, DESCRIPTION).is_file() else None


def quantization_in(folder: str) -> str | None:
    """Return the quantisation method of the model in a folder, as its own files state it; None for none."""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # The engine will say what is wrong with the folder, in its own words.
        return None
    section = config.get("quantization_config") if isinstance(config, dict) else None
    stated = section.get("quant_method") if isinstance(section, dict) else None
    return quantization_of(folder, str(stated) if stated else None)


def serving_dtype(dtype: str, accelerator: str, quantization: str | None) -> str:
    """Return the dtype to serve in: float16 on 310P; bfloat16 for the vendor's W8A8 unless something is asked for."""
    if is_310p(accelerator):
        return "float16"
    return "bfloat16" if quantization == MODELSLIM and dtype == "auto" else dtype


def overhead_bytes(facts: ModelFacts, tp: int, pp: int) -> int:
    """Return memory of a device beside weights and KV cache: runtime, HCCL, a step in 16 bits, logits in 32."""
    width = -(-(facts.intermediate_size or 4 * facts.hidden_size) // tp)
    activations = _STEP_TOKENS * (2 * width + 3 * facts.hidden_size) * 2
    logits = _STEP_SEQUENCES * facts.vocab_size * 4
    return RUNTIME_BYTES + (COLLECTIVE_BYTES if tp * pp > 1 else 0) + activations + logits


def _pipeline_objections(accelerator: str, wish: PoolWish) -> list[tuple[str, str]]:
    if not is_310p(accelerator) or (wish.pp or 1) == 1:
        return []
    return [("feature", f"pipeline parallel {wish.pp} on {accelerator}: HCCL on 310P has no pipelines, only TP")]


def _dtype_objections(facts: ModelFacts, accelerator: str, quantization: str | None) -> list[tuple[str, str]]:
    if facts.dtype.startswith("float8") and not is_950(accelerator):
        return [("dtype", f"weights are {facts.dtype}, {accelerator} has no fp8; 950 has")]
    if quantization == MODELSLIM and facts.dtype == "float16" and not is_310p(accelerator):
        return [("dtype", f"W8A8 weights with float16: {accelerator} needs bfloat16 for them")]
    return []


def _quantization_objections(accelerator: str, quantization: str | None) -> list[tuple[str, str]]:
    known = list(_QUANTIZATIONS)
    if is_950(accelerator):
        known.append("fp8")
    if is_310p(accelerator):
        # It has quantised layers of its own, for the vendor's format only.
        known = [MODELSLIM]
    if quantization is None or quantization in known:
        return []
    return [("feature", f"quantisation {quantization}; vllm-ascend on {accelerator} has {', '.join(known)}")]
