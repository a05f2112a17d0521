"""Read what a model folder says about itself: config.json, safetensors headers, and whether a tokenizer is there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetero_llm.errors import ModelFolderInvalid
from hetero_llm.model import ModelFacts
from hetero_llm.models.geometry import Geometry, read_geometry
from hetero_llm.models.shares import loaded, parameter_counts, weight_shares
from hetero_llm.models.tensors import Tensor, main_dtype, read_index, read_tensors, weight_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_TOKENIZER_PATTERNS = ("*.tiktoken", "tokenizer.model.v*", "tokenization_*.py")


_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

# float32 models are served in the device's 16-bit type (vLLM's `_resolve_auto_dtype`).
_SERVED_BYTES = {**_ELEMENT_BYTES, "float32": 2}


def read_facts(path: Path, name: str, source: str, *, complete: bool = True) -> ModelFacts:
    """Return the facts of the model in folder `path`; milliseconds, whatever the size of the weights.

    Args:
        name: the name clients use.
        source: what the user wrote: alias, hub id, or folder.
        complete: everything that serving needs must be there. False is enough for a plan: config.json and an index of
            the weights that states their size do without the weights and the tokenizer.

    Raises:
        ModelFolderInvalid: the folder or something in it that is needed is missing or broken; named.
    """
    _require_folder(path)
    config_path = path / "config.json"
    geometry = read_geometry(_read_json(config_path), str(config_path), _tokenizer_limit(path))
    if not complete and (facts := _facts_of_index(path, name, source, geometry)) is not None:
        return facts
    tensors = read_tensors(weight_files(path))
    _require_tokenizer(path)
    return replace(facts_of_tensors(geometry, tensors, name, source), path=str(path))


def facts_of_tensors(geometry: Geometry, tensors: Mapping[str, Tensor], name: str, source: str) -> ModelFacts:
    """Return the facts of a model whose config and safetensors headers are known; `path` is None."""
    dtype = geometry.dtype or main_dtype(tensors.values()) or "float32"
    used = loaded(tensors, geometry)
    parameters, active = parameter_counts(used, geometry)
    element_bytes = None if geometry.quantization is not None else _SERVED_BYTES.get(dtype)
    return replace(
        _facts_of_geometry(geometry, name, source, dtype),
        parameters=parameters,
        active_parameters=active,
        weights_bytes=sum(tensor.stored_bytes for tensor in tensors.values()),
        weights=weight_shares(used, geometry, element_bytes),
    )


def _facts_of_index(path: Path, name: str, source: str, geometry: Geometry) -> ModelFacts | None:
    """Return what config and index tell when weight files are missing; None when all are there or too little is."""
    index = read_index(path)
    if index is None or not _lacks_weights(path):
        return None
    facts = _facts_of_geometry(geometry, name, source, geometry.dtype or "bfloat16")
    parameters = index.parameters or index.total_bytes // _ELEMENT_BYTES.get(facts.dtype, 2)
    return replace(facts, path=str(path), parameters=parameters, weights_bytes=index.total_bytes)


def _lacks_weights(path: Path) -> bool:
    try:
        return not weight_files(path)
    except ModelFolderInvalid:
        return True


def _facts_of_geometry(geometry: Geometry, name: str, source: str, dtype: str) -> ModelFacts:
    return ModelFacts(
        name=name,
        source=source,
        architecture=geometry.architecture,
        parameters=0,
        weights_bytes=0,
        layers=geometry.layers,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        latent_kv_size=geometry.latent_kv_size,
        vocab_size=geometry.vocab_size,
        max_model_len=geometry.max_model_len,
        dtype=dtype,
        quantization=geometry.quantization,
        quantization_group_size=geometry.quantization_group_size,
    )


def _require_folder(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise ModelFolderInvalid(
            f"{path} is a file, not a model folder",
            cause="a model is a folder with config.json, *.safetensors and a tokenizer",
            next=("give the folder that holds the model",),
        )
    raise ModelFolderInvalid(f"the model folder {path} does not exist", next=("check the path",))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFolderInvalid(
            f"{path.parent} has no {path.name}",
            cause="a model is a folder with config.json, *.safetensors and a tokenizer",
            next=("give the folder that holds the model", "download the model again"),
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFolderInvalid(f"{path} cannot be read", cause=f"{type(error).__name__}: {error}") from error
    if not isinstance(data, dict):
        raise ModelFolderInvalid(
            f"{path} cannot be read", cause=f"a JSON object is needed, found {type(data).__name__}"
        )
    return data


def _tokenizer_limit(path: Path) -> int | None:
    config = path / "tokenizer_config.json"
    if not config.is_file():
        return None
    limit = _read_json(config).get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and limit > 0 else None


def _require_tokenizer(path: Path) -> None:
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        return
    if any(True for pattern in _TOKENIZER_PATTERNS for _ in path.glob(pattern)):
        return
    raise ModelFolderInvalid(
        f"{path} has no tokenizer",
        cause=f"none of {', '.join(_TOKENIZER_FILES)} is there",
        next=("copy the tokenizer files of the model into the folder",),
    )
