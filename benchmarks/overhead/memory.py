"""Resident memory of our own processes, read from the kernel, and whether an engine's libraries are mapped in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

MB = 1_000_000
_ENGINE_LIBRARY = re.compile(r"/(?:libtorch\w*\.so|torch/|vllm/)")

LIMITS_MB = {"gateway": 120, "replica actor": 150, "scheduler": 150}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One process.

    Attributes:
        role: what it is.
        rss_bytes: resident, pages shared with others counted in full.
        pss_bytes: resident, shared pages divided among those who share them.
        has_engine_libraries: torch or vllm is mapped.
    """

    role: str
    pid: int
    rss_bytes: int
    pss_bytes: int
    has_engine_libraries: bool


def memories(serve_pid: int, status: dict[str, Any]) -> tuple[Memory, ...]:
    """Return all processes of a `serve` but the engine's: ours first, then Ray's.

    Args:
        serve_pid: the supervising process.
        status: what the gateway says.
    """
    roles = dict(_roles(serve_pid, status))
    engines = {pid for replica in status["replicas"] for pid in _tree(replica["engine_pid"])}
    for pid in _tree(serve_pid) - engines:
        roles.setdefault(pid, _ray_role(pid))
    return tuple(_memory(pid, role) for pid, role in roles.items())


def _roles(serve_pid: int, status: dict[str, Any]) -> Iterator[tuple[int, str]]:
    gateway = psutil.Process(status["gateway"]["pid"])
    yield gateway.pid, "gateway"
    keeper = psutil.Process(gateway.ppid())
    yield keeper.pid, "keeper"
    yield keeper.ppid(), "gateway actor"
    for replica in status["replicas"]:
        yield psutil.Process(replica["engine_pid"]).ppid(), "keeper"
        yield replica["actor_pid"], "replica actor"
    for pid in _tree(serve_pid):
        if "ray::Scheduler" in _title(pid):
            yield pid, "scheduler"
    yield serve_pid, "serve command"


def _tree(pid: int) -> set[int]:
    root = psutil.Process(pid)
    return {root.pid, *(process.pid for process in root.children(recursive=True))}


def _ray_role(pid: int) -> str:
    title = _title(pid)
    if title.startswith("ray::"):
        return title.partition(" ")[0].partition(".")[0]
    # Programs in Python are known by their script, the others by their own name.
    name = psutil.Process(pid).name()
    script = next((word for word in title.split() if word.endswith(".py")), None)
    return f"ray {Path(script).name}" if script and name.startswith("python") else f"ray {name}"


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def _memory(pid: int, role: str) -> Memory:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return Memory(
        role=role,
        pid=pid,
        rss_bytes=_kib_of(rollup, "Rss") * 1024,
        pss_bytes=_kib_of(rollup, "Pss") * 1024,
        has_engine_libraries=bool(_ENGINE_LIBRARY.search(Path(f"/proc/{pid}/maps").read_text())),
    )


def _kib_of(rollup: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", rollup, re.MULTILINE)
    assert found is not None, f"no {name} in smaps_rollup"
    return int(found.group(1))
