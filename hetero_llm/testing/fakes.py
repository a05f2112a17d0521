"""Fakes at the border of the process that any plugin can use: an installed distribution that is not there."""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def fake_distribution(name: str, version: str) -> Iterator[None]:
    """Let ``importlib.metadata.version(name)`` answer `version` while this is entered, whatever is installed."""
    with tempfile.TemporaryDirectory(prefix="hetero-llm-fake-") as folder:
        info = Path(folder) / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.path.remove(folder)
            importlib.invalidate_caches()
