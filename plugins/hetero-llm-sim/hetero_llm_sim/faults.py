"""Faults an engine can be told to have, at its start or while it runs.

They are written as one line, the same in the environment, as a flag and over HTTP::

    die_after_tokens=5
    unavailable:times=2, slow_down=4:for_s=10
    hang:skip=1

``skip=N`` lets N requests pass first (the readiness token, for one), ``times=N`` ends the fault after N requests had
it, ``for_s=S`` ends it after S seconds. Requests are those that generate; see `Faults.for_request`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FAULTS_ENV = "HETERO_LLM_SIM_FAULTS"

NAMES = {
    "die_before_first_byte": None,
    "die_after_tokens": int,
    "hang": None,
    "silent_after_tokens": int,
    "refuse": None,
    "slow_down": float,
    "unavailable": None,
    "garbage": None,
    "empty": None,
    "wrong_text": int,
    "health_ok": None,
    "health_fail": None,
    "slow_start": float,
}
"""Fault to the type of its value, None where it takes none. What each does is in the README."""

_DEFAULT_VALUE = {"wrong_text": 0.0}
_OF_THE_ENGINE = frozenset(("refuse", "slow_down", "health_ok", "health_fail", "slow_start"))
_NUMBER = re.compile(r"\d+(\.\d+)?")


class FaultsInvalid(ValueError):
    """A line of faults cannot be read; the message says which part and what it may be."""


@dataclass(slots=True, kw_only=True)
class Fault:
    """One fault and how much of it is left."""

    name: str
    value: float = 0.0
    skip: int = 0
    times: int | None = None
    for_s: float | None = None
    since_s: float = 0.0

    def is_on(self, now_s: float) -> bool:
        """Tell whether it is neither used up nor over."""
        return self.times != 0 and (self.for_s is None or now_s < self.since_s + self.for_s)

    def strikes(self, now_s: float) -> bool:
        """Take one request into account; tell whether the fault hits it."""
        if not self.is_on(now_s):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is not None:
            self.times -= 1
        return True


@dataclass(slots=True)
class Faults:
    """The faults an engine has now; empty by default."""

    active: list[Fault] = field(default_factory=list)

    def for_request(self, now_s: float) -> dict[str, float]:
        """Return name and value of the faults that hit the generating request that just came."""
        hit = (fault for fault in self.active if fault.name not in _OF_THE_ENGINE)
        return {fault.name: fault.value for fault in hit if fault.strikes(now_s)}

    def value_of(self, name: str, now_s: float) -> float | None:
        """Return the value of a fault that is on, without using any of it up; None while it is off."""
        on = (fault for fault in self.active if fault.name == name and fault.is_on(now_s) and fault.skip == 0)
        return next((fault.value for fault in on), None)

    def next_end_s(self, now_s: float) -> float | None:
        """Return when the next fault with a duration is over."""
        ends = (fault.since_s + fault.for_s for fault in self.active if fault.for_s is not None)
        return min((end for end in ends if end > now_s), default=None)

    def to_data(self, now_s: float) -> list[dict[str, object]]:
        """Return the faults that are on, for JSON."""
        keys = ("name", "value", "skip", "times", "for_s")
        return [{key: getattr(fault, key) for key in keys} for fault in self.active if fault.is_on(now_s)]


def parse_faults(line: str, now_s: float = 0.0) -> Faults:
    """Read a line of faults; an empty one is no fault.

    Raises:
        FaultsInvalid: a name, option or value is not known, or a name comes twice.
    """
    faults = [_parse_one(part.strip(), now_s) for part in line.split(",") if part.strip()]
    names = [fault.name for fault in faults]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise FaultsInvalid(f"{', '.join(sorted(twice))} is given twice")
    return Faults(faults)


def _parse_one(text: str, now_s: float) -> Fault:
    head, *options = (word.strip() for word in text.split(":"))
    name, equals, value = (word.strip() for word in head.partition("="))
    if name not in NAMES:
        raise FaultsInvalid(f"{name!r} is not a fault; there are {', '.join(NAMES)}")
    fault = Fault(name=name, value=_value(name, value if equals else None), since_s=now_s)
    for option in options:
        key, _, number = (word.strip() for word in option.partition("="))
        if key == "for_s":
            fault.for_s = _number(option, number)
        elif key in ("skip", "times") and name not in _OF_THE_ENGINE:
            setattr(fault, key, int(_number(option, number, whole=True)))
        else:
            raise FaultsInvalid(f"{option!r} is not an option of {name}")
    return fault


def _value(name: str, text: str | None) -> float:
    kind = NAMES[name]
    if text is None and (kind is None or name in _DEFAULT_VALUE):
        return _DEFAULT_VALUE.get(name, 0.0)
    if kind is None or text is None:
        raise FaultsInvalid(f"{name} takes {'no value' if kind is None else 'a value: ' + name + '=N'}")
    value = _number(f"{name}={text}", text, whole=kind is int)
    if name == "slow_down" and value == 0:
        raise FaultsInvalid("slow_down must be above 0; 1 is the profile's own speed")
    return value


def _number(where: str, text: str, *, whole: bool = False) -> float:
    if not _NUMBER.fullmatch(text) or (whole and "." in text):
        raise FaultsInvalid(f"{where!r} needs a {'whole ' if whole else ''}number of at least 0")
    return float(text)
