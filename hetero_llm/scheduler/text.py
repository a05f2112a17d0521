"""Numbers as people read them in reasons."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1 << 30


def gib(size_bytes: int) -> str:
    """Return a size in GiB with enough digits to compare two that are close, ``1.53 GiB``."""
    value = size_bytes / GIB
    return f"{value:.1f} GiB" if value >= 100 else f"{value:.2f} GiB"


def listed(names: Sequence[str], limit: int = 6, joined: str = ", ") -> str:
    """Return the first `limit` names in one line, and how many more there are."""
    shown = joined.join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def count(number: int, noun: str) -> str:
    """Return ``1 device``, ``2 devices``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
