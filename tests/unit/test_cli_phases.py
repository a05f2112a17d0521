"""How a start looks where nobody watches: a line per change, a heartbeat without change."""

import pytest

from hetero_llm.cli.phases import LineDisplay, phase_table, phase_text
from hetero_llm.model import ReplicaState, ReplicaStatus


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def display(clock):
    return LineDisplay(clock)


def replica(phase=None, state=ReplicaState.STARTING, **fields):
    common = {"model": "m", "app": "a", "kind": "cpu", "accelerator": "x", "node": "n", "started_unix_s": 0.0}
    return ReplicaStatus(replica="m-1", state=state, phase=phase, **common, **fields)


def told(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_phase_is_told_once_with_the_seconds_since_the_start(display, clock, capsys):
    clock.now_s = 101.5
    display.replicas([replica("loading weights")])
    display.replicas([replica("loading weights")])
    assert told(capsys) == ["[  1.5 s] m-1: loading weights"]


def test_a_new_phase_is_told(display, capsys):
    display.replicas([replica("loading weights")])
    display.replicas([replica(state=ReplicaState.READY, ready_after_s=12.3)])
    assert told(capsys)[1].endswith("m-1: ready after 12.3 s")


def test_a_phase_that_lasts_gives_a_sign_of_life_every_30_seconds(display, clock, capsys):
    for second in range(0, 70, 5):
        clock.now_s = 100.0 + second
        display.replicas([replica("loading weights")])
    assert [line.split("] ")[1] for line in told(capsys)] == [
        "m-1: loading weights",
        *["m-1: still loading weights"] * 2,
    ]


def test_progress_is_told_by_quarters_with_bytes(display, capsys):
    for done in range(0, 101):
        display.progress("converting", done << 20, 100 << 20)
    assert [line.split("] ")[1] for line in told(capsys)] == [
        "converting",
        "converting (1.0 MiB of 100.0 MiB)",
        "converting (25.0 MiB of 100.0 MiB)",
        "converting (50.0 MiB of 100.0 MiB)",
        "converting (75.0 MiB of 100.0 MiB)",
        "converting (100.0 MiB of 100.0 MiB)",
    ]


def test_progress_of_unknown_size_is_told_once(display, capsys):
    display.progress("waiting", None, None)
    display.progress("waiting", None, None)
    assert len(told(capsys)) == 1


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (replica(), "starting"),
        (replica("loading"), "loading"),
        (replica(state=ReplicaState.READY), "ready"),
        (replica(state=ReplicaState.DRAINING), "draining"),
    ],
)
def test_a_replicas_phase_in_words(status, text):
    assert phase_text(status) == text


def test_the_live_table_shows_for_how_long_a_phase_lasts():
    table = phase_table([replica("loading", phase_since_s=4.4), replica(state=ReplicaState.READY, phase_since_s=9.0)])
    assert [row[-1] for row in table.rows] == ["4 s", None]
