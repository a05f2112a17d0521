"""Stopping on request: the first signal ends what runs, later ones are told so, and some steps are finished first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from hetero_llm.cli import render

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
COLLECT_S = 0.1

_blocking = threading.Event()


def _unblock_in_child() -> None:
    # A child inherits the mask of the thread that forks, and Ray's processes must stay stoppable. Runs in every child
    # that is forked with a preexec_fn, as Ray's are.
    if _blocking.is_set():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


os.register_at_fork(after_in_child=_unblock_in_child)


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived; derived from KeyboardInterrupt so that no ``except Exception`` swallows it."""


class StopSignals:
    """A context in which Ctrl-C, SIGTERM and SIGHUP raise `Interrupted` once, in the main thread."""

    def __init__(self) -> None:
        self.stopping = False
        self._deferring = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # After a stop the process is about to end; a late second Ctrl-C must not change its exit code.
            signal.signal(number, signal.SIG_IGN if self.stopping else handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the block before a signal takes effect: half a started cluster could not be cleaned up.

        The signals are blocked and collected by a thread, not merely handled: `ray.init` puts a handler of its own in
        place, in C++, that aborts the process. Ours is put back before they are let through again. Threads that were
        there before, Ray's own for example, do not block; what one of them gets is told by the wake-up pipe, while
        the handler itself waits for the main thread.
        """
        stopping_before = self.stopping
        try:
            with _wakeups() as wakeups, self._collecting(wakeups):
                yield
        finally:
            if self.stopping and not stopping_before:
                raise Interrupted

    def hold(self) -> None:
        """From now on signals only get the answer that the end is under way."""
        self.stopping = True

    def _install(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    @contextmanager
    def _collecting(self, wakeups: int) -> Iterator[None]:
        done = threading.Event()
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        _blocking.set()
        self._deferring = True
        collector = threading.Thread(target=self._collect, args=(wakeups, done))
        collector.start()
        try:
            yield
        finally:
            done.set()
            collector.join()
            self._install()
            _blocking.clear()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            self._deferring = False
            self._note_taken(wakeups)

    def _collect(self, wakeups: int, done: threading.Event) -> None:
        while not done.is_set():
            if signal.sigtimedwait(STOP_SIGNALS, COLLECT_S) is not None:
                self._note()
            self._note_taken(wakeups)

    def _note_taken(self, wakeups: int) -> None:
        for number in _read_wakeups(wakeups):
            if number in STOP_SIGNALS:
                self._note()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # While deferring, the wake-up pipe has told of it already.
        if not self._deferring and self._note():
            raise Interrupted

    def _note(self) -> bool:
        """Answer a signal; return whether it is the first."""
        first = not self.stopping
        self.stopping = True
        render.say("stopping …" if first else "already stopping")
        return first


@contextmanager
def _wakeups() -> Iterator[int]:
    """Yield a pipe that gets the number of every handled signal at once, whichever thread takes it."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _read_wakeups(reader: int) -> bytes:
    try:
        return os.read(reader, 4096)
    except BlockingIOError:
        return b""
