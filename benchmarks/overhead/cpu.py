"""CPU time read from the kernel: what the gateway used, and what others on the machine took meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far: the first field of its threads' schedstat, in nanoseconds."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def busy_s() -> float:
    """Return the CPU time the machine has been busy so far, all cores together."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def used_s(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of these processes so far; of those that have ended, nothing."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total
