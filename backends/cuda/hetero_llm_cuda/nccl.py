"""The NCCL library of this Python environment, found without importing torch."""

from __future__ import annotations

import ctypes.util
from importlib import metadata
from pathlib import Path

LIBRARY = "libnccl.so.2"


def library_path() -> str | None:
    """Return the path or name of the NCCL library torch would load: from its wheel, else from the system."""
    for distribution in metadata.distributions():
        if (distribution.name or "").lower().startswith("nvidia-nccl"):
            files = (file for file in distribution.files or () if Path(file).name == LIBRARY)
            found = next((Path(str(distribution.locate_file(file))) for file in files), None)
            if found is not None and found.exists():
                return str(found)
    return ctypes.util.find_library("nccl")
