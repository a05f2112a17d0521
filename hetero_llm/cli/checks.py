"""The doctor's checks that belong to no kind: Python, Ray and its token, disks, folders, limits of the process."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from hetero_llm.plugin import Check
from hetero_llm.plugin.software import installed

MIN_PYTHON = (3, 11)
MIN_CACHE_FREE_BYTES = 1 << 30
MIN_SHM_FREE_BYTES = 256 << 20
MIN_DOWNLOAD_FREE_BYTES = 4 << 30
MIN_OPEN_FILES = 4096
SOCKET_PATH_LIMIT = 107
"""Bytes in the path of a Unix socket on Linux."""
RAY_SOCKET_SUFFIX = len("/hetero-ray-xxxxxxxx/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")


def general_checks() -> tuple[Check, ...]:
    """Run all checks of this machine that need no look at its devices."""
    from hetero_llm.cli.checks_network import network_checks
    from hetero_llm.cli.checks_software import software_checks

    return (*(check() for check in _CHECKS), *software_checks(), *network_checks())


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """Return whether the interpreter is new enough."""
    text = f"Python {'.'.join(str(part) for part in version)}"
    wanted = ".".join(str(part) for part in MIN_PYTHON)
    ok = version[:2] >= MIN_PYTHON
    return Check(name="python", ok=ok, text=text, next=() if ok else (f"use Python {wanted} or newer",))


def check_ray() -> Check:
    """Return whether the installed Ray is one we were built for, without importing it."""
    wanted = next((text for text in metadata.requires("hetero-llm") or () if text.startswith("ray[")), "ray")
    found = installed("ray")
    if found is None:
        return Check(name="ray", ok=False, text="Ray is not installed", next=(f"pip install '{wanted}'",))
    from packaging.requirements import Requirement

    ok = Requirement(wanted).specifier.contains(found)
    return Check(
        name="ray", ok=ok, text=f"ray {found}, wanted {wanted}", next=() if ok else (f"pip install '{wanted}'",)
    )


def check_token(path: Path | None = None) -> Check:
    """Return whether the token of Ray clusters can be read by its owner, and by nobody else.

    Args:
        path: default: ``RAY_AUTH_TOKEN_PATH``, else where Ray itself looks.
    """
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = path or Path(named or "~/.ray/auth_token").expanduser()
    try:
        mode = path.stat().st_mode
        content = path.read_bytes().strip()
    except FileNotFoundError:
        if not named:
            return Check(name="ray-token", ok=True, text="no token kept here; a cluster started here makes its own")
        advice = ("unset RAY_AUTH_TOKEN_PATH", "copy the token of the cluster's head there")
        return Check(name="ray-token", ok=False, text=f"RAY_AUTH_TOKEN_PATH={named} does not exist", next=advice)
    except OSError as error:
        return Check(name="ray-token", ok=False, text=f"{path} cannot be read: {error.strerror}", next=("ls -l",))
    if not content:
        return Check(name="ray-token", ok=False, text=f"{path} is empty", next=(f"rm {path}",))
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        text = f"{path} is open to others (mode {stat.S_IMODE(mode):04o}): whoever reads it may run code here"
        return Check(name="ray-token", ok=False, text=text, next=(f"chmod 600 {path}",))
    return Check(name="ray-token", ok=True, text=f"{path} is there, for its owner only")


def check_open_files(soft: int | None = None) -> Check:
    """Return whether a process may open enough files: each stream, peer and worker takes one.

    Args:
        soft: the limit; default: that of this process.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if soft is None else soft
    ok = soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES
    shown = "no limit of" if soft == resource.RLIM_INFINITY else str(soft)
    text = f"{shown} open files per process, {MIN_OPEN_FILES} wanted"
    advice = ("ulimit -n 65536", "in a container: --ulimit nofile=65536")
    return Check(name="open-files", ok=ok, text=text, next=() if ok else advice)


def check_downloads() -> Check:
    """Return whether models from a hub have room; too little is a note, since a model may be small."""
    from hetero_llm.models.hub import hub_cache_dir

    advice = "set HF_HOME to a larger disk"
    check = check_space("downloads", hub_cache_dir(), MIN_DOWNLOAD_FREE_BYTES, advice)
    return dataclasses.replace(check, ok=check.ok or None)


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
    """Return whether records can be read, and records and logs written."""
    from hetero_llm.cluster.state import all_live_records, state_dir
    from hetero_llm.errors import FolderUnusable

    advice = "set HETERO_LLM_STATE_DIR to a folder you may write"
    try:
        folder = state_dir()
        all_live_records()
        with tempfile.TemporaryFile(dir=folder):
            return Check(name="state", ok=True, text=f"{folder} can be written")
    except FolderUnusable as error:
        text = f"{error}: {error.report.cause}"
        return Check(name="state", ok=False, text=text, next=(advice,))
    except OSError as error:
        return Check(
            name="state", ok=False, text=f"cannot use the folder for records and logs: {error}", next=(advice,)
        )


def check_temp(folder: str | None = None) -> Check:
    """Return whether Ray's sockets fit below the temporary folder: their paths are limited to 107 bytes."""
    folder = folder or tempfile.gettempdir()
    length = len(os.fsencode(folder)) + RAY_SOCKET_SUFFIX
    text = f"Ray's socket paths below {folder} have about {length} bytes of {SOCKET_PATH_LIMIT}"
    ok = length <= SOCKET_PATH_LIMIT
    return Check(name="temp", ok=ok, text=text, next=() if ok else ("set TMPDIR to a shorter path, for example /tmp",))


_CHECKS: tuple[Callable[[], Check], ...] = (
    check_python,
    check_ray,
    check_token,
    check_cache,
    check_downloads,
    check_shm,
    check_open_files,
    check_state,
    check_temp,
)
