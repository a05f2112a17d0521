"""The doctor's checks that belong to no kind: Python, Ray, disks, folders."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from hetero_llm.plugin import Check

MIN_PYTHON = (3, 11)
MIN_CACHE_FREE_BYTES = 1 << 30
MIN_SHM_FREE_BYTES = 256 << 20
SOCKET_PATH_LIMIT = 107
"""Bytes in the path of a Unix socket on Linux."""
RAY_SOCKET_SUFFIX = len("/hetero-ray-xxxxxxxx/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


def general_checks() -> tuple[Check, ...]:
    """Run all of them on this machine."""
    return tuple(check() for check in _CHECKS)


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Return whether the interpreter is new enough."""
    text = f"Python {'.'.join(str(part) for part in version)}"
    wanted = ".".join(str(part) for part in MIN_PYTHON)
    ok = version[:2] >= MIN_PYTHON
    return Check(name="python", ok=ok, text=text, next=() if ok else (f"use Python {wanted} or newer",))


def check_ray() -> Check:
    """Return whether the installed Ray is one we were built for, without importing it."""
    wanted = next((text for text in metadata.requires("hetero-llm") or () if text.startswith("ray[")), "ray")
    try:
        found = metadata.version("ray")
    except metadata.PackageNotFoundError:
        return Check(name="ray", ok=False, text="Ray is not installed", next=(f"pip install '{wanted}'",))
    from packaging.requirements import Requirement

    ok = Requirement(wanted).specifier.contains(found)
    return Check(
        name="ray", ok=ok, text=f"ray {found}, wanted {wanted}", next=() if ok else (f"pip install '{wanted}'",)
    )


def check_cache() -> Check:
    """Return whether converted models have room."""
    from hetero_llm.models.cache import models_dir

    return check_space("cache", models_dir(), MIN_CACHE_FREE_BYTES, "set HETERO_LLM_CACHE_DIR to a larger disk")


def check_shm() -> Check:
    """Return whether shared memory has room for Ray's object store and the engine's queues."""
    return check_space("shm", Path("/dev/shm"), MIN_SHM_FREE_BYTES, "in a container: --shm-size=1g or --ipc=host")


def check_space(name: str, folder: Path, wanted_bytes: int, advice: str) -> Check:
    """Return whether the disk of `folder` (or of its nearest existing parent) has `wanted_bytes` free."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if there is None:
        return Check(name=name, ok=None, text=f"{folder} does not exist")
    free = shutil.disk_usage(there).free
    text = f"{free >> 20} MiB free in {folder}, {wanted_bytes >> 20} MiB wanted"
    return Check(name=name, ok=free >= wanted_bytes, text=text, next=() if free >= wanted_bytes else (advice,))


def check_state() -> Check:
    """Return whether records and logs can be written."""
    from hetero_llm.cluster.state import state_dir

    advice = "set HETERO_LLM_STATE_DIR to a folder you may write"
    try:
        folder = state_dir()
        with tempfile.TemporaryFile(dir=folder):
            return Check(name="state", ok=True, text=f"{folder} can be written")
    except OSError as error:
        return Check(name="state", ok=False, text=f"cannot write: {error}", next=(advice,))


def check_temp(folder: str | None = None) -> Check:
    """Return whether Ray's sockets fit below the temporary folder: their paths are limited to 107 bytes."""
    folder = folder or tempfile.gettempdir()
    length = len(os.fsencode(folder)) + RAY_SOCKET_SUFFIX
    text = f"Ray's socket paths below {folder} have about {length} bytes of {SOCKET_PATH_LIMIT}"
    ok = length <= SOCKET_PATH_LIMIT
    return Check(name="temp", ok=ok, text=text, next=() if ok else ("set TMPDIR to a shorter path, for example /tmp",))


_CHECKS: tuple[Callable[[], Check], ...] = (check_python, check_ray, check_cache, check_shm, check_state, check_temp)
