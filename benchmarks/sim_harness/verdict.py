"""When a row counts, and whether a time is the profile's. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VOID_S = 0.002
"""Later events than this, at the 99th percentile, and the machine made the times, not the profile."""

TOLERANCE = 0.05


def late_quantile_s(late: Mapping[float, int], share: float) -> float | None:
    """Return the smallest bound under which `share` of the events lie; None without any event.

    Args:
        late: upper bound in seconds to the number of events that were at most so late, as a Prometheus histogram has
            them, infinity included.
    """
    total = late[float("inf")]
    if total == 0:
        return None
    return next(bound_s for bound_s, count in sorted(late.items()) if count >= share * total)


def is_void(late_s: float | None) -> bool:
    """Say whether a row with this 99th percentile must not be used; one without any event measured nothing."""
    return late_s is None or late_s > VOID_S


def validity(late_s: float | None) -> str:
    """Return ``void`` or ``ok``."""
    return "void" if is_void(late_s) else "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A time a client measured, against what the profile says.

    Attributes:
        late_s: 99th percentile of the lateness of the engine's events meanwhile; None without any.
    """

    name: str
    measured_s: float
    profile_s: float
    late_s: float | None

    @property
    def difference(self) -> float:
        """By which share of the profile's time the measured one is longer."""
        return self.measured_s / self.profile_s - 1

    @property
    def verdict(self) -> str:
        """``void`` by the rule of late events, else ``pass`` when within `TOLERANCE`, else ``FAIL``."""
        if is_void(self.late_s):
            return "void"
        return "pass" if abs(self.difference) <= TOLERANCE else "FAIL"
