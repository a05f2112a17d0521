"""Count a model's weights from safetensors headers; the tensors themselves are not read.

Format: https://github.com/huggingface/safetensors, section "Format": 8 bytes little-endian header length N, N bytes of
JSON ``{name: {"dtype", "shape", "data_offsets": [begin, end]}}``, then the data, with offsets counted from its start.
"""

from __future__ import annotations

import json
import math
from collections import Counter
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
class TensorTotals:
    """Sums over all tensors of a model.

    Attributes:
        parameters: number of elements.
        weights_bytes: bytes as stored.
        dtype: torch's name of the type that takes most bytes, None when it has no torch name here.
    """

    parameters: int
    weights_bytes: int
    dtype: str | None


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


def read_totals(files: tuple[Path, ...]) -> TensorTotals:
    """Return the sums over the headers of `files`.

    Raises:
        ModelFolderInvalid: a file is truncated or no safetensors file; the message names it and both sizes.
    """
    parameters = 0
    bytes_of: Counter[str] = Counter()
    for path in files:
        for tensor in _read_header(path).values():
            begin, end = tensor["data_offsets"]
            parameters += math.prod(tensor["shape"])
            bytes_of[tensor["dtype"]] += end - begin
    main = bytes_of.most_common(1)[0][0] if bytes_of else None
    return TensorTotals(
        parameters=parameters, weights_bytes=bytes_of.total(), dtype=_TORCH_DTYPES.get(main) if main else None
    )


def _indexed_files(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderInvalid(f"{index} cannot be read", cause=f"{type(error).__name__}: {error}") from error
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


def _read_header(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(start := file.read(8), "little")
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _unreadable(path, _why_no_header(start + file.read(32), size, length))
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise _unreadable(path, f"its header is not the JSON the format asks for ({error})") from error
    if 8 + length + end != size:
        raise _unreadable(path, f"the file has {size} bytes, its header describes {8 + length + end}")
    return header


def _why_no_header(start: bytes, size: int, length: int) -> str:
    if start.startswith(_LFS_POINTER):
        return "it is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    return f"the file has {size} bytes, its first 8 announce a header of {length} bytes"


def _unreadable(path: Path, cause: str) -> ModelFolderInvalid:
    return ModelFolderInvalid(
        f"{path} is not a complete safetensors file", cause=cause, next=("download or copy the file again",)
    )
