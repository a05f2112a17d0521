"""Find models that Hugging Face tooling has already downloaded. Nothing is fetched.

Layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache -
``models--<org>--<name>/refs/<revision>`` holds a commit, ``snapshots/<commit>/`` the files of it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def looks_like_hub_id(text: str) -> bool:
    """Say whether `text` has the form ``org/name``."""
    return _HUB_ID.fullmatch(text) is not None


def hub_cache_dir() -> Path:
    """Return the folder of downloads: ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else ``~/.cache/huggingface/hub``."""
    explicit = os.environ.get("HF_HUB_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def find_snapshot(hub_id: str) -> Path | None:
    """Return the folder of the newest download of `hub_id`, complete or not; None when there is none."""
    root = hub_cache_dir() / f"models--{hub_id.replace('/', '--')}"
    main = root / "refs" / "main"
    if main.is_file():
        snapshot = root / "snapshots" / main.read_text().strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = sorted((root / "snapshots").glob("*/"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    return snapshots[-1] if snapshots else None


def downloaded_ids() -> tuple[str, ...]:
    """Return the ids of all downloaded models, ascending."""
    names = (path.name.removeprefix("models--") for path in hub_cache_dir().glob("models--*--*/"))
    return tuple(sorted(name.replace("--", "/", 1) for name in names))
