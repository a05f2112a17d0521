"""Stop signals: once they interrupt, then they are answered; some steps are finished first."""

import os
import signal

import pytest

from hetero_llm.cli.signals import STOP_SIGNALS, Interrupted, StopSignals


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_interrupts(number):
    with StopSignals() as signals, pytest.raises(Interrupted):
        send(number)
    assert signals.stopping


def test_a_second_signal_is_told_that_the_end_is_under_way(capsys):
    with StopSignals():
        with pytest.raises(Interrupted):
            send(signal.SIGINT)
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert capsys.readouterr().err.splitlines() == ["stopping …", "already stopping", "already stopping"]


def test_a_deferred_step_is_finished_before_the_signal_takes_effect():
    done = []
    with StopSignals() as signals, pytest.raises(Interrupted):
        with signals.deferred():
            send(signal.SIGTERM)
            done.append("step")
        done.append("after")
    assert done == ["step"]


def test_a_deferred_step_that_fails_after_a_signal_is_an_interruption():
    with StopSignals() as signals, pytest.raises(Interrupted), signals.deferred():
        send(signal.SIGINT)
        raise RuntimeError("the signal reached the child too")


def test_taking_down_is_not_interrupted(capsys):
    with StopSignals() as signals:
        signals.hold()
        send(signal.SIGINT)
    assert capsys.readouterr().err == "already stopping\n"


def test_no_broad_except_swallows_an_interruption():
    assert not issubclass(Interrupted, Exception)


def test_the_former_handlers_come_back():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
