"""Devices whose health flaps are kept out until they have been good for a while.

Pure: one reading of all devices goes in, the same devices with the health to publish come out, so that a device's
health and its other facts always belong to one reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_llm.model import Device, Health

BAD_READINGS = 3
"""Bad readings since the last good spell that put a device into quarantine; a single one only shows.

A health that is not known is no good reading: nothing is planned on such a device either.
"""

GOOD_READINGS = 3
"""Good readings in a row that make a good spell: the device comes back, and what was bad before is forgotten."""

_GOOD = (Health.OK, Health.DEGRADED)


@dataclass(slots=True)
class _Past:
    bad: int = 0
    good_in_a_row: int = 0


class Quarantine:
    """Remembers the readings of one node's devices, by uid."""

    def __init__(self) -> None:
        """Nothing was read yet."""
        self._past: dict[str, _Past] = {}

    def read(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """Take a reading; return the devices in their order, good ones in quarantine as `Health.FAILED`.

        A reading that is not good is published as it is: what is not known has not failed.
        """
        return tuple(self._judged(device) for device in devices)

    def _judged(self, device: Device) -> Device:
        past = self._past.setdefault(device.uid, _Past())
        if device.health not in _GOOD:
            past.bad += 1
            past.good_in_a_row = 0
            return device
        past.good_in_a_row += 1
        if past.good_in_a_row >= GOOD_READINGS:
            past.bad = 0
        return replace(device, health=Health.FAILED) if past.bad >= BAD_READINGS else device
