"""Which CPU cores and how much memory this process may use, read from /proc, /sys and the cgroup files.

Every function takes the root of the file system, so that captured trees of other machines can be read in tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 60
"""cgroup v1 says *no limit* with a number near 2**63."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One physical core: its NUMA node, its socket, and its usable logical CPUs (SMT siblings), ascending."""

    numa: int
    package: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one NUMA node."""

    total_bytes: int
    free_bytes: int


def cores(root: Path = ROOT, allowed: Iterable[int] | None = None) -> tuple[Core, ...]:
    """Return the physical cores with at least one allowed logical CPU, ascending by NUMA node, then CPU id.

    `allowed` defaults to this process's affinity. Where /sys tells nothing, each logical CPU is a core on node 0.
    """
    usable = set(os.sched_getaffinity(0) if allowed is None else allowed)
    numa_of = _numa_of_cpus(root)
    seen: dict[tuple[int, ...], Core] = {}
    for cpu in sorted(usable):
        siblings = tuple(sorted(usable & (set(_siblings(root, cpu)) | {cpu})))
        seen[siblings] = Core(numa=numa_of.get(cpu, 0), package=_package(root, cpu), cpus=siblings)
    return tuple(sorted(seen.values(), key=lambda core: (core.numa, core.cpus)))


def first_siblings(cpus: Iterable[int], root: Path = ROOT) -> tuple[int, ...]:
    """Return one logical CPU per physical core among `cpus`: the lowest. Two threads on one core slow OpenMP down."""
    return tuple(sorted(core.cpus[0] for core in cores(root, cpus)))


def memory_by_numa(root: Path = ROOT) -> dict[int, Memory]:
    """Return memory per NUMA node, scaled down so that all nodes together stay within the cgroup's limit."""
    system = _meminfo(root / "proc/meminfo")
    nodes = {number: _node_memory(path) for number, path in _numa_folders(root).items()}
    nodes = {number: memory for number, memory in nodes.items() if memory.total_bytes > 0}
    whole = Memory(total_bytes=system.get("MemTotal", 0), free_bytes=system.get("MemAvailable", 0))
    nodes = nodes or {0: whole}
    limit, used = cgroup_memory(root)
    total = _capped(sum(m.total_bytes for m in nodes.values()), whole.total_bytes or None, limit)
    left = None if limit is None else max(0, limit - (used or 0))
    free = _capped(sum(m.free_bytes for m in nodes.values()), whole.free_bytes or None, left)
    return _scaled(nodes, total, free)


def cgroup_memory(root: Path = ROOT) -> tuple[int | None, int | None]:
    """Return the tightest memory limit on this process and the bytes used under it; None without a limit.

    Page cache that can be dropped is not counted as used.
    """
    tightest: tuple[int | None, int | None] = (None, None)
    for folder, limit_name, usage_name in _cgroup_folders(root, "memory"):
        limit = read_int(folder / limit_name)
        if limit is not None and limit < _UNLIMITED and (tightest[0] is None or limit < tightest[0]):
            usage = read_int(folder / usage_name)
            tightest = (limit, None if usage is None else max(0, usage - _inactive_file(folder)))
    return tightest


def cgroup_cpu_quota(root: Path = ROOT) -> float | None:
    """Return how many CPUs' worth of time the cgroup allows, None without a quota."""
    quotas = [_quota(folder) for folder, _, _ in _cgroup_folders(root, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """Return the instruction-set flags of the first CPU (x86 ``flags``, ARM ``Features``)."""
    return frozenset((cpuinfo(root).get("flags") or cpuinfo(root).get("Features") or "").split())


def cpuinfo(root: Path = ROOT) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo."""
    first = read_text(root / "proc/cpuinfo").split("\n\n", 1)[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def read_text(path: Path) -> str:
    """Return a file's text, empty when the kernel does not have it or does not show it to us."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_int(path: Path) -> int | None:
    """Return the whole number in a file, None when there is none (``max`` included)."""
    text = read_text(path).strip()
    return int(text) if re.fullmatch(r"-?[0-9]+", text) else None


def id_list(text: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as ``0-3,8``."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.strip().isdigit():
            numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _siblings(root: Path, cpu: int) -> tuple[int, ...]:
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return id_list(read_text(folder / "thread_siblings_list") or read_text(folder / "core_cpus_list"))


def _package(root: Path, cpu: int) -> int:
    number = read_int(root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id")
    return max(0, number or 0)


def _numa_folders(root: Path) -> dict[int, Path]:
    folders = (root / "sys/devices/system/node").glob("node[0-9]*")
    return {int(folder.name[4:]): folder for folder in sorted(folders) if folder.name[4:].isdigit()}


def _numa_of_cpus(root: Path) -> dict[int, int]:
    folders = _numa_folders(root).items()
    return {cpu: number for number, folder in folders for cpu in id_list(read_text(folder / "cpulist"))}


def _meminfo(path: Path) -> dict[str, int]:
    """Return the fields of a meminfo file in bytes; the ``Node N`` prefix of the per-node files is dropped."""
    found = re.findall(r"^(?:Node \d+ )?([A-Za-z()_]+):\s+(\d+) kB", read_text(path), re.MULTILINE)
    return {key: int(kib) * 1024 for key, kib in found}


def _node_memory(folder: Path) -> Memory:
    info = _meminfo(folder / "meminfo")
    # What MemAvailable is for the whole system; the kernel gives no such field per node.
    reclaimable = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return Memory(total_bytes=info.get("MemTotal", 0), free_bytes=sum(info.get(key, 0) for key in reclaimable))


def _capped(value: int, *limits: int | None) -> int:
    return min(value, *(limit for limit in limits if limit is not None), value)


def _scaled(nodes: dict[int, Memory], total: int, free: int) -> dict[int, Memory]:
    all_total = sum(memory.total_bytes for memory in nodes.values()) or 1
    all_free = sum(memory.free_bytes for memory in nodes.values()) or 1
    return {
        number: Memory(
            total_bytes=memory.total_bytes * total // all_total,
            free_bytes=min(memory.free_bytes * free // all_free, memory.total_bytes * total // all_total),
        )
        for number, memory in nodes.items()
    }


def _cgroup_folders(root: Path, controller: str) -> list[tuple[Path, str, str]]:
    """Return (folder, limit file, usage file) for this process's cgroup and all above it, v2 and v1.

    A container may show a path that exists only outside; its own limits are then those of the mount's root.
    """
    found: list[tuple[Path, str, str]] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            bases = (root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified")
            files = ("memory.max", "memory.current")
        elif controller in names.split(","):
            bases = (root / "sys/fs/cgroup" / controller, root / "sys/fs/cgroup" / names)
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        found += [(folder, *files) for base in bases for folder in _upwards(base, path)]
    return found


def _upwards(base: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part and part != ".."]
    return [base.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _inactive_file(folder: Path) -> int:
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _quota(folder: Path) -> float | None:
    quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return int(quota) / int(period)
    quota_us, period_us = read_int(folder / "cpu.cfs_quota_us"), read_int(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None
