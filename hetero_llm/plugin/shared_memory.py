"""A doctor check every kind needs: the space in /dev/shm, through which the ranks of an engine talk within a node."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_llm.plugin.backend import Check

_GIB = 1 << 30


def check_shared_memory(kind: str, folder: Path, wanted_bytes: int) -> Check:
    """Return the check ``<kind>.shm``: passed when `folder` has `wanted_bytes` free."""
    name = f"{kind}.shm"
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        text = f"{folder} cannot be used: {error.strerror}"
        return Check(name=name, ok=False, text=text, next=(f"mount a tmpfs at {folder}",))
    free = stat.f_bavail * stat.f_frsize
    text = f"{free / _GIB:.1f} GiB free in {folder}"
    if free >= wanted_bytes:
        return Check(name=name, ok=True, text=text)
    wanted = -(-wanted_bytes // _GIB)
    advice = (f"docker run --shm-size={wanted}g", f"mount -o remount,size={wanted}G {folder}")
    return Check(name=name, ok=False, text=f"{text}, {wanted} GiB are needed", next=advice)
