"""A place on a replica, taken at the moment of choice and given back exactly once."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from hetero_llm.model import Target


class Outcome(StrEnum):
    """How a request on a replica ended; decides what the breaker learns from it."""

    OK = "ok"
    """The replica answered in full, with any status that is its own answer (a 4xx included)."""
    CANCELLED = "cancelled"
    """The client left. Says nothing about the replica."""
    TIMED_OUT = "timed_out"
    """The client's own deadline passed. Says nothing about the replica."""
    BUSY = "busy"
    """The replica answered 503 or 504: load, not failure."""
    UNREACHABLE = "unreachable"
    """No TCP connection could be made."""
    FAILED = "failed"
    """The connection broke or the answer was not HTTP, before or within the answer; or 502."""


class Reservation:
    """One request's place on one replica.

    Attributes:
        target: the replica chosen.
        work: the request's expected work, in the unit the router's caller uses throughout.
    """

    __slots__ = ("_on_release", "target", "work")

    def __init__(self, target: Target, work: float, on_release: Callable[[Reservation, Outcome], None]) -> None:
        self.target = target
        self.work = work
        self._on_release: Callable[[Reservation, Outcome], None] | None = on_release

    def release(self, outcome: Outcome) -> bool:
        """Give the place back. Only the first call counts; returns whether this was it."""
        on_release, self._on_release = self._on_release, None
        if on_release is None:
            return False
        on_release(self, outcome)
        return True
