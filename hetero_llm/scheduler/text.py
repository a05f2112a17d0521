"""Numbers as people read them in reasons."""

from __future__ import annotations

GIB = 1 << 30


def gib(size_bytes: int) -> str:
    """Return a size in GiB with enough digits to compare two that are close, ``1.53 GiB``."""
    value = size_bytes / GIB
    return f"{value:.1f} GiB" if value >= 100 else f"{value:.2f} GiB"


def count(number: int, noun: str) -> str:
    """Return ``1 device``, ``2 devices``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
