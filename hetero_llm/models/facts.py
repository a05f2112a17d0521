"""Read what a model folder says about itself: config.json, safetensors headers, and whether a tokenizer is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hetero_llm.errors import ModelFolderInvalid
from hetero_llm.model import ModelFacts
from hetero_llm.models.geometry import read_geometry
from hetero_llm.models.tensors import read_totals, weight_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model")
_TOKENIZER_PATTERNS = ("*.tiktoken", "tokenizer.model.v*", "tokenization_*.py")


def read_facts(path: Path, name: str, source: str) -> ModelFacts:
    """Return the facts of the model in folder `path`; milliseconds, whatever the size of the weights.

    Args:
        name: the name clients use.
        source: what the user wrote: alias, hub id, or folder.

    Raises:
        ModelFolderInvalid: the folder or something in it that serving needs is missing or broken; named.
    """
    _require_folder(path)
    config_path = path / "config.json"
    geometry = read_geometry(_read_json(config_path), str(config_path), _tokenizer_limit(path))
    totals = read_totals(weight_files(path))
    _require_tokenizer(path)
    return ModelFacts(
        name=name,
        source=source,
        path=str(path),
        architecture=geometry.architecture,
        parameters=totals.parameters,
        weights_bytes=totals.weights_bytes,
        layers=geometry.layers,
        heads=geometry.heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden_size=geometry.hidden_size,
        intermediate_size=geometry.intermediate_size,
        latent_kv_size=geometry.latent_kv_size,
        vocab_size=geometry.vocab_size,
        max_model_len=geometry.max_model_len,
        dtype=geometry.dtype or totals.dtype or "float32",
        quantization=geometry.quantization,
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
