"""Stop signals: once they interrupt, then they are answered; some steps are finished first."""

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from hetero_llm.cli.signals import STOP_SIGNALS, Interrupted, StopSignals


@pytest.fixture(autouse=True)
def handlers_of_the_test_run():
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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


def run_deferred(step, thread: threading.Thread | None = None) -> None:
    """Run `step` deferred, after a signal to this process or to one `thread` of it."""
    with StopSignals() as signals, signals.deferred():
        if thread is None:
            send(signal.SIGTERM)
        else:
            signal.pthread_kill(thread.ident, signal.SIGTERM)
        step()


def test_a_deferred_step_is_finished_before_the_signal_takes_effect():
    done = []
    with pytest.raises(Interrupted):
        run_deferred(lambda: done.append("step"))
    assert done == ["step"]


@pytest.fixture
def thread_that_does_not_block():
    """Another thread from before the signals are blocked: it does not block them, as Ray's threads do not."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield thread
    end.set()
    thread.join()


def test_a_deferred_step_is_finished_although_another_thread_gets_the_signal(thread_that_does_not_block):
    done = []
    with pytest.raises(Interrupted):
        run_deferred(lambda: done.append(threading.Event().wait(0.2)), thread_that_does_not_block)
    assert done == [False]


def test_a_deferred_step_that_fails_after_a_signal_is_an_interruption():
    with pytest.raises(Interrupted):
        run_deferred(lambda: 1 / 0)


def test_a_handler_that_a_deferred_step_puts_in_place_is_taken_out_again():
    with StopSignals() as signals:
        with signals.deferred():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with pytest.raises(Interrupted):
            send(signal.SIGTERM)


class Heard(io.StringIO):
    """A stream that tells when something is written to it, from whichever thread."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length


def answered_at_once(monkeypatch, thread=None) -> list[str]:
    """Return what was said by the end of a deferred step that waits for the answer to a signal."""
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    answered = []
    with pytest.raises(Interrupted):
        run_deferred(lambda: answered.append(heard.written.wait(10)), thread)
    assert answered == [True]
    return heard.getvalue().splitlines()


def test_signals_during_a_deferred_step_are_answered_at_once(monkeypatch):
    assert answered_at_once(monkeypatch) == ["stopping …"]


def test_a_signal_that_another_thread_gets_is_answered_at_once(monkeypatch, thread_that_does_not_block):
    assert answered_at_once(monkeypatch, thread_that_does_not_block) == ["stopping …"]


def test_children_of_a_deferred_step_can_still_be_stopped():
    script = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with StopSignals() as signals, signals.deferred():
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=lambda: None
        )
    assert done.stdout == "set()\n"


def test_taking_down_is_not_interrupted(capsys):
    with StopSignals() as signals:
        signals.hold()
        send(signal.SIGINT)
    assert capsys.readouterr().err == "already stopping\n"


def test_no_broad_except_swallows_an_interruption():
    assert not issubclass(Interrupted, Exception)


def test_a_late_signal_does_not_change_how_the_process_ends():
    with StopSignals() as signals:
        signals.hold()
    send(signal.SIGTERM)


def test_the_former_handlers_come_back():
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopSignals():
        pass
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
