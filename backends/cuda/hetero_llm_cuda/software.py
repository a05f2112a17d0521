"""What is installed in this Python environment, found without importing any of it."""

from __future__ import annotations

import ctypes.util
from importlib import metadata
from pathlib import Path

NCCL = "libnccl.so.2"


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def nccl_library() -> str | None:
    """Return the path or name of the NCCL library torch would load: from its wheel, else from the system."""
    for distribution in metadata.distributions():
        if (distribution.name or "").lower().startswith("nvidia-nccl"):
            files = (file for file in distribution.files or () if Path(file).name == NCCL)
            found = next((Path(str(distribution.locate_file(file))) for file in files), None)
            if found is not None and found.exists():
                return str(found)
    return ctypes.util.find_library("nccl")


def platform_plugins() -> tuple[str, ...]:
    """Return vLLM's out-of-tree platform plugins here, ``name (module:function, distribution)``, in order of name."""
    entries = metadata.entry_points(group="vllm.platform_plugins")
    return tuple(sorted(f"{e.name} ({e.value}, {e.dist.name if e.dist else 'unknown'})" for e in entries))
