"""One clock for all processes of the machine: seconds since boot, which is also how the kernel notes their starts."""

from __future__ import annotations

import os
import time
from pathlib import Path


def now_s() -> float:
    """Return seconds since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def from_unix_s(unix_s: float) -> float:
    """Return a wall-clock time of another process on this clock."""
    return unix_s - time.time() + now_s()


def process_start_s(pid: int) -> float:
    """Return when a process was started, to 10 ms (field 22 of /proc/PID/stat, see proc(5))."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(after_name[19]) / os.sysconf("SC_CLK_TCK")
