"""List a model's tensors from safetensors headers; the tensors themselves are not read.

Format: https://github.com/huggingface/safetensors, section "Format": 8 bytes little-endian header length N, N bytes of
JSON ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the data, with offsets counted from its start.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.errors import ModelFolderInvalid

INDEX_NAME = "model.safetensors.index.json"

# The limit of the format's own reader; a larger length means that the file is something else.
_MAX_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"

_TORCH_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64", "F8_E4M3": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor of a header; `dtype` is the format's own name, ``BF16``."""

    dtype: str
    shape: tuple[int, ...]
    stored_bytes: int

    @property
    def elements(self) -> int:
        """Number of elements as stored; packed weights count as the integers that hold them."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexTotals:
    """What an index says without its files.

    Attributes:
        names: of all tensors.
        total_bytes: bytes of all tensors as stored.
        parameters: number of weights, None where the index does not say.
    """

    names: frozenset[str]
    total_bytes: int
    parameters: int | None


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files that make up the model in `folder`, ascending by name.

    Raises:
        ModelFolderInvalid: there are none, the index cannot be read, or a file the index names is missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_files(index)
    files = tuple(sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("adapter_")))
    if not files:
        raise ModelFolderInvalid(
            f"{folder} has no weights",
            cause=_why_no_weights(folder),
            next=("put the model's *.safetensors files next to its config.json",),
        )
    return files


def read_tensors(files: Iterable[Path]) -> dict[str, Tensor]:
    """Return the tensors in the headers of `files` by name.

    Raises:
        ModelFolderInvalid: a file is truncated or no safetensors file; the message names it and both sizes.
    """
    return {name: tensor for path in files for name, tensor in _read_header(path).items()}


def main_dtype(tensors: Iterable[Tensor]) -> str | None:
    """Return torch's name of the type that takes most bytes, None when it has no torch name here."""
    bytes_of: Counter[str] = Counter()
    for tensor in tensors:
        bytes_of[tensor.dtype] += tensor.stored_bytes
    return _TORCH_DTYPES.get(bytes_of.most_common(1)[0][0]) if bytes_of else None


def read_index(folder: Path) -> IndexTotals | None:
    """Return what the index in `folder` says of all tensors; None without an index that states their size.

    Raises:
        ModelFolderInvalid: the index cannot be read.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        return None
    index = _load_index(path)
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(total, int | float) or total <= 0:
        return None
    parameters = metadata.get("total_parameters") if isinstance(metadata, dict) else None
    return IndexTotals(
        names=frozenset(index["weight_map"]),
        total_bytes=int(total),
        parameters=parameters if isinstance(parameters, int) and parameters > 0 else None,
    )


def _load_index(path: Path) -> Mapping[str, Any]:
    try:
        index = json.loads(path.read_bytes())
        index["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderInvalid(f"{path} cannot be read", cause=f"{type(error).__name__}: {error}") from error
    return dict(index)


def _indexed_files(index: Path) -> tuple[Path, ...]:
    names = sorted(set(_load_index(index)["weight_map"].values()))
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing or not names:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise ModelFolderInvalid(
            f"{index.parent} lacks {len(missing)} of the {len(names)} weight files that its index names: {shown}",
            cause="the download or copy is not complete",
            next=("download the missing files into the folder",),
        )
    return tuple(index.parent / name for name in names)


def _why_no_weights(folder: Path) -> str:
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in {".bin", ".pt", ".pth", ".gguf"} and path.is_file()
    )
    if others:
        return f"found {others[0]}, but only *.safetensors files are read"
    return f"neither {INDEX_NAME} nor any *.safetensors file is there"


def _read_header(path: Path) -> dict[str, Tensor]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(start := file.read(8), "little")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _unreadable(path, _why_no_header(start + file.read(32), size, length))
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
        tensors = {name: _tensor(entry) for name, entry in header.items()}
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _unreadable(path, f"its header is not the JSON the format asks for ({error})") from error
    if 8 + length + end != size:
        raise _unreadable(path, f"the file has {size} bytes, its header describes {8 + length + end}")
    return tensors


def _tensor(entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(dtype=entry["dtype"], shape=tuple(entry["shape"]), stored_bytes=end - begin)


def _why_no_header(start: bytes, size: int, length: int) -> str:
    if start.startswith(_LFS_POINTER):
        return "it is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    return f"the file has {size} bytes, its first 8 announce a header of {length} bytes"


def _unreadable(path: Path, cause: str) -> ModelFolderInvalid:
    return ModelFolderInvalid(
        f"{path} is not a complete safetensors file", cause=cause, next=("download or copy the file again",)
    )
