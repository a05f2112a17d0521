"""Pauses between attempts."""

import pytest

from hetero_llm.scheduler.backoff import FIRST_S, LONGEST_S, Backoff


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_a_name_is_due_after_the_first_pause_and_only_then(clock):
    backoff = Backoff(clock)
    assert not backoff.due("a"), "nobody said that it fails"
    assert backoff.failing("a") == FIRST_S
    clock.now_s += FIRST_S - 0.1
    assert not backoff.due("a")
    backoff.failing("a")
    clock.now_s += 0.1
    assert backoff.due("a"), "saying it again does not lengthen the pause"


def test_each_pause_is_twice_as_long_up_to_the_longest(clock):
    backoff, pauses = Backoff(clock), []
    for _ in range(7):
        pauses.append(backoff.failing("a"))
        clock.now_s += pauses[-1]
        assert backoff.due("a")
        backoff.tried("a")
        assert not backoff.due("a")
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, 16 * FIRST_S, LONGEST_S, LONGEST_S]


def test_what_works_begins_anew_and_names_do_not_share_pauses(clock):
    backoff = Backoff(clock)
    for name in ("a", "b"):
        backoff.failing(name)
        backoff.tried(name)
    backoff.well("a")
    assert (backoff.failing("a"), backoff.failing("b")) == (FIRST_S, 2 * FIRST_S)
