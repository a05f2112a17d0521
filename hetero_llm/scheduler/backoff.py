"""When to try again what keeps failing: soon at first, then less and less often. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 15.0
"""Pause before the first new attempt. Ray Serve tries by itself before; its own pauses are shorter at first."""

LONGEST_S = 300.0

SETTLE_S = 3.0
"""What fails for less than this may be between two attempts of Serve's own."""


@dataclass(slots=True)
class _Pause:
    length_s: float
    since_s: float | None


class Backoff:
    """Pauses by name, each from the end of an attempt; the next is twice as long, up to `LONGEST_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Know no name; `clock` gives seconds."""
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}

    def failing(self, name: str) -> float | None:
        """Note that `name` fails and nobody tries it; return the seconds of its pause, None before it has settled."""
        pause = self._pauses.setdefault(name, _Pause(FIRST_S, None))
        if pause.since_s is None:
            pause.since_s = self._clock()
        return pause.length_s if self._clock() - pause.since_s >= SETTLE_S else None

    def due(self, name: str) -> bool:
        """Return whether the pause of `name` is over."""
        pause = self._pauses.get(name)
        return pause is not None and pause.since_s is not None and self._clock() >= pause.since_s + pause.length_s

    def trying(self, name: str) -> None:
        """Note that an attempt of `name` is under way; should it fail, the pause begins then."""
        if pause := self._pauses.get(name):
            pause.since_s = None

    def tried_again(self, name: str) -> None:
        """Make the next pause of `name` longer: it is being tried again now."""
        self._pauses[name] = _Pause(min(LONGEST_S, 2 * self._pauses[name].length_s), None)

    def well(self, name: str) -> None:
        """Forget `name`: it works."""
        self._pauses.pop(name, None)
