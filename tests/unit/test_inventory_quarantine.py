"""A card that flaps is kept out after three bad readings and comes back after three good ones."""

import pytest

from hetero_llm.inventory.quarantine import Quarantine
from hetero_llm.model import Device, Health

OK, BAD, WARN, UNKNOWN = Health.OK, Health.FAILED, Health.DEGRADED, Health.UNKNOWN


def device(health, uid="u0", index=0, free_bytes=1):
    return Device(kind="cuda", accelerator="X", uid=uid, index=index, health=health, free_bytes=free_bytes)


def published(readings):
    quarantine = Quarantine()
    return [quarantine.read([device(health)])[0].health for health in readings]


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        ([OK, OK], [OK, OK]),
        ([BAD, OK], [BAD, OK]),
        ([BAD, BAD, OK], [BAD, BAD, OK]),
        ([BAD, OK, BAD, OK, BAD, OK], [BAD, OK, BAD, OK, BAD, BAD]),
        ([BAD, BAD, BAD, OK, OK, OK], [BAD, BAD, BAD, BAD, BAD, OK]),
        ([BAD, BAD, BAD, OK, OK, BAD, OK, OK, OK], [BAD] * 8 + [OK]),
        ([BAD, BAD, OK, OK, OK, BAD, BAD, OK], [BAD, BAD, OK, OK, OK, BAD, BAD, OK]),
        ([UNKNOWN, UNKNOWN, UNKNOWN, WARN], [UNKNOWN, UNKNOWN, UNKNOWN, BAD]),
        ([BAD, UNKNOWN, BAD, UNKNOWN, OK], [BAD, UNKNOWN, BAD, UNKNOWN, BAD]),
        ([UNKNOWN] * 3 + [OK] * 3, [UNKNOWN] * 3 + [BAD, BAD, OK]),
        ([WARN, WARN, WARN], [WARN, WARN, WARN]),
    ],
)
def test_three_bad_readings_keep_a_device_out_until_three_good_ones(readings, expected):
    assert published(readings) == expected


def test_each_device_has_a_past_of_its_own_whatever_its_number():
    quarantine = Quarantine()
    for _ in range(3):
        quarantine.read([device(BAD, "a", 0), device(OK, "b", 1)])
    read = quarantine.read([device(OK, "b", 0), device(OK, "a", 1)])
    assert [(d.uid, d.health) for d in read] == [("b", OK), ("a", BAD)]


def test_the_other_facts_are_those_of_the_same_reading():
    quarantine = Quarantine()
    read = [quarantine.read([device(BAD, free_bytes=n)])[0].free_bytes for n in range(4)]
    assert read == [0, 1, 2, 3]
