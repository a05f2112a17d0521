"""Pauses between attempts."""

import pytest

from hetero_llm.scheduler.backoff import FIRST_S, LONGEST_S, SETTLE_S, Backoff


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
    backoff.failing("a")
    clock.now_s += FIRST_S - 0.1
    assert not backoff.due("a")
    backoff.failing("a")
    clock.now_s += 0.1
    assert backoff.due("a"), "saying it again does not lengthen the pause"


def test_what_has_just_begun_to_fail_is_not_told(clock):
    backoff = Backoff(clock)
    assert backoff.failing("a") is None
    clock.now_s += SETTLE_S
    assert backoff.failing("a") == FIRST_S


def test_each_pause_is_twice_as_long_up_to_the_longest(clock):
    backoff, pauses = Backoff(clock), []
    for _ in range(7):
        backoff.failing("a")
        clock.now_s += SETTLE_S
        pauses.append(backoff.failing("a"))
        clock.now_s += pauses[-1] - SETTLE_S
        assert backoff.due("a")
        backoff.tried_again("a")
        assert not backoff.due("a")
    assert pauses == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 8 * FIRST_S, 16 * FIRST_S, LONGEST_S, LONGEST_S]


def test_a_pause_begins_when_an_attempt_has_ended_however_long_that_took(clock):
    backoff = Backoff(clock)
    backoff.trying("a")
    backoff.failing("a")
    clock.now_s += 2
    backoff.trying("a")
    clock.now_s += 10 * LONGEST_S
    assert not backoff.due("a"), "it is being tried"
    backoff.failing("a")
    assert not backoff.due("a")
    clock.now_s += FIRST_S
    assert backoff.due("a")


def test_what_works_begins_anew_and_names_do_not_share_pauses(clock):
    backoff = Backoff(clock)
    for name in ("a", "b"):
        backoff.failing(name)
        backoff.tried_again(name)
    backoff.well("a")
    for name in ("a", "b"):
        backoff.failing(name)
    clock.now_s += SETTLE_S
    assert (backoff.failing("a"), backoff.failing("b")) == (FIRST_S, 2 * FIRST_S)
