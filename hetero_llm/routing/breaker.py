"""Keeps requests away from a replica that cannot be reached, and finds out when it can be again."""

from __future__ import annotations

FIRST_COOL_DOWN_S = 0.5
LONGEST_COOL_DOWN_S = 8.0
FAILURES_TO_OPEN = 3
"""Broken answers in a row that open the breaker; one refused connection is enough by itself."""


class Breaker:
    """Closed (requests flow), open (none do), or half-open (one request at a time probes).

    Pure: the time is an argument, in seconds of any monotonic clock.
    """

    __slots__ = ("_cool_down_s", "_failures", "_open_until_s", "_probing")

    def __init__(self) -> None:
        self._failures = 0
        self._cool_down_s = FIRST_COOL_DOWN_S
        self._open_until_s: float | None = None
        self._probing = False

    @property
    def closed(self) -> bool:
        """Whether requests flow without restriction."""
        return self._open_until_s is None

    def allows(self, now_s: float) -> bool:
        """Tell whether a request may be sent now; in the half-open state only while no probe is under way."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._probing)

    def begin(self) -> None:
        """A request is sent. While open, that request is the probe."""
        if self._open_until_s is not None:
            self._probing = True

    def succeed(self) -> None:
        """A request got its answer: close, and forget earlier failures."""
        self._failures = 0
        self._cool_down_s = FIRST_COOL_DOWN_S
        self._open_until_s = None
        self._probing = False

    def fail(self, now_s: float, *, at_once: bool) -> None:
        """A request failed. Opens `at_once` or after `FAILURES_TO_OPEN` in a row; each further failure waits longer."""
        self._failures += 1
        if self._open_until_s is not None and not self._probing:
            return  # one of several requests that were under way when the breaker opened
        if self._probing:
            self._cool_down_s = min(2 * self._cool_down_s, LONGEST_COOL_DOWN_S)
        elif not at_once and self._failures < FAILURES_TO_OPEN:
            return
        self._probing = False
        self._open_until_s = now_s + self._cool_down_s

    def give_up(self) -> None:
        """A request ended without telling anything about the replica: another one may probe."""
        self._probing = False
