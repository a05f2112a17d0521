"""The folder of converted models: where it is, who may write it, and whether what lies there is still what was made.

Layout: ``<cache>/models/<alias>-<source hash>-r<recipe>/`` with the model's files and a manifest. A folder appears by
rename, whole or not at all. The manifest holds size, modification time and SHA-256 of each file: a look at sizes and
times decides in microseconds, and only a file whose time differs is hashed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import platformdirs

MANIFEST_NAME = "hetero-llm-manifest.json"
_MANIFEST_VERSION = 1
_CHUNK_BYTES = 4 << 20
_LOCK_POLL_S = 0.2

Progress = Callable[[str, int | None, int | None], None]
"""Called with (phase, done, total); done and total are bytes, None when not known."""


def models_dir() -> Path:
    """Return the folder of converted models; it need not exist. ``HETERO_LLM_CACHE_DIR`` moves the cache."""
    return _root() / "models"


def outlines_dir() -> Path:
    """Return the folder of what plans know of models that are only on the hub; it need not exist."""
    return _root() / "outlines"


def _root() -> Path:
    return Path(os.environ.get("HETERO_LLM_CACHE_DIR") or platformdirs.user_cache_dir("hetero-llm")).expanduser()


@contextmanager
def exclusive(name: str, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock `name` of the cache; the kernel releases it when the process dies.

    Args:
        waiting: called once when somebody else holds the lock.

    Raises:
        OSError: the cache cannot be written.
    """
    folder = models_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as file:
        announced = False
        while not _try_lock(file.fileno()):
            if not announced:
                waiting()
                announced = True
            time.sleep(_LOCK_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sha256_of(path: Path, phase: str, progress: Progress) -> str:
    """Return the SHA-256 of a file in hex, reporting bytes read."""
    total = path.stat().st_size
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(phase, done, total)
    return digest.hexdigest()


def write_manifest(folder: Path, source_sha256: str, hashes: Mapping[str, str]) -> None:
    """Record the files of `folder`, given their hashes by name."""
    files = {name: {**_stamp(folder / name), "sha256": hashes[name]} for name in sorted(hashes)}
    data = {"version": _MANIFEST_VERSION, "source_sha256": source_sha256, "files": files}
    temporary = folder / f".{MANIFEST_NAME}.{os.getpid()}"
    temporary.write_text(json.dumps(data, indent=1))
    temporary.replace(folder / MANIFEST_NAME)


def is_intact(folder: Path, source_sha256: str, progress: Progress) -> bool:
    """Say whether `folder` holds exactly what was recorded, made from `source_sha256`.

    A file with the recorded size but another time (the folder was copied) is hashed, and its new time recorded.
    """
    recorded = _read_manifest(folder)
    if recorded is None or recorded.get("source_sha256") != source_sha256:
        return False
    changed = []
    for name, entry in recorded["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            return False
        if _stamp(path) != {"bytes": entry["bytes"], "mtime_ns": entry["mtime_ns"]}:
            changed.append(name)
    if any(sha256_of(folder / name, "checking", progress) != recorded["files"][name]["sha256"] for name in changed):
        return False
    if changed and os.access(folder, os.W_OK):
        write_manifest(folder, source_sha256, {name: entry["sha256"] for name, entry in recorded["files"].items()})
    return True


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    try:
        data = json.loads((folder / MANIFEST_NAME).read_bytes())
        usable = data["version"] == _MANIFEST_VERSION and all(
            entry.keys() >= {"bytes", "mtime_ns", "sha256"} for entry in data["files"].values()
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        # A manifest nobody can read vouches for nothing: the folder is made anew.
        return None
    return data if usable else None


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
