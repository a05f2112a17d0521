"""When to try again what keeps failing: soon at first, then less and less often. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_S = 15.0
"""Pause before the first new attempt. Ray Serve tries by itself before; its own pauses are shorter at first."""

LONGEST_S = 300.0


@dataclass(slots=True)
class _Pause:
    until_s: float
    length_s: float


class Backoff:
    """Pauses by name; each is twice as long as the one before, up to `LONGEST_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Know no name; `clock` gives seconds."""
        self._clock = clock
        self._pauses: dict[str, _Pause] = {}

    def failing(self, name: str) -> float:
        """Note that `name` fails and is not being tried; return the length of its pause in seconds."""
        pause = self._pauses.setdefault(name, _Pause(self._clock() + FIRST_S, FIRST_S))
        return pause.length_s

    def due(self, name: str) -> bool:
        """Return whether the pause of `name` is over."""
        pause = self._pauses.get(name)
        return pause is not None and self._clock() >= pause.until_s

    def tried(self, name: str) -> None:
        """Begin the next pause of `name`: it is being tried now. It counts from now, however long the attempt takes."""
        length_s = min(LONGEST_S, 2 * self._pauses[name].length_s)
        self._pauses[name] = _Pause(self._clock() + length_s, length_s)

    def well(self, name: str) -> None:
        """Forget `name`: it works."""
        self._pauses.pop(name, None)
