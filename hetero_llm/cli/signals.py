"""Stopping on request: the first signal ends what runs, later ones are told so, and some steps are finished first."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from hetero_llm.cli import render

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A stop signal arrived; derived from KeyboardInterrupt so that no ``except Exception`` swallows it."""


class StopSignals:
    """A context in which Ctrl-C, SIGTERM and SIGHUP raise `Interrupted` once, in the main thread."""

    def __init__(self) -> None:
        self.stopping = False
        self._deferred = False
        self._pending = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        self._before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Finish the block before a signal takes effect: half a started cluster could not be cleaned up."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            if self._pending:
                self._pending = False
                raise Interrupted

    def hold(self) -> None:
        """From now on signals only get the answer that the end is under way."""
        self.stopping = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.stopping:
            render.say("already stopping")
            return
        self.stopping = True
        render.say("stopping …")
        if self._deferred:
            self._pending = True
        else:
            raise Interrupted
