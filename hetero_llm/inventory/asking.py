"""Run programs that may hang on sick hardware, all at the same time, and have their answers by a deadline.

Vendor libraries hang on sick drivers, print to stdout, and crash. None of that may reach the caller: whatever becomes
of a program, its process tree is gone afterwards, and the answers of the others are there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from hetero_llm.model import from_data

_REAP_S = 5.0
_STOP_POLL_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one program said.

    Attributes:
        status: exit status, negative for a signal; None when it did not end in time.
        out: its standard output.
        last_line: the last line of its standard error, empty when there is none.
    """

    status: int | None
    out: bytes
    last_line: str

    def answer(self, form: type[T], deadline_s: float) -> T:
        """Return the JSON it wrote, as `form`.

        Raises:
            TimeoutError: it did not end within `deadline_s`; the text tells what it last said.
            ValueError: it failed, or its answer cannot be read; the text tells why in one line.
        """
        if self.status is None:
            text = f"did not answer within {deadline_s:g} s"
            raise TimeoutError(f"{text}; last said: {self.last_line}" if self.last_line else text)
        if self.status != 0:
            how = f"ended by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
            raise ValueError(self.last_line or how)
        try:
            return from_data(msgspec.json.decode(self.out), form)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"its answer cannot be read: {error}") from error


def ask(
    programs: Mapping[str, Sequence[str]],
    deadline_s: float,
    environ: Mapping[str, str] = os.environ,
    stopped: threading.Event | None = None,
) -> dict[str, Said]:
    """Run all `programs` (argv by name) with `environ`; the deadline holds for each from the common start.

    Once `stopped` is set, or when this is interrupted, every program is killed with all it started.
    """
    deadline = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="hetero-llm-asking-") as folder:
        running: dict[str, _Running] = {}
        try:
            for number, (name, argv) in enumerate(programs.items()):
                running[name] = _Running(argv, Path(folder) / str(number), environ)
            return {name: program.said(deadline, stopped) for name, program in running.items()}
        finally:
            for program in running.values():
                program.kill()
            for program in running.values():
                program.reap()


def answer_stream() -> IO[bytes]:
    """Return standard output for the answer of this process alone: what libraries print there goes to stderr."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    return os.fdopen(answer_fd, "wb")


class _Running:
    """One program. Output goes to files: a grandchild that keeps a pipe open could block a reader for ever."""

    def __init__(self, argv: Sequence[str], stem: Path, environ: Mapping[str, str]) -> None:
        self._out, self._err = stem.with_suffix(".out"), stem.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environ), process_group=0
            )

    def said(self, deadline: float, stopped: threading.Event | None) -> Said:
        status = self._status(deadline if stopped is None else 0.0)
        while stopped and status is None and time.monotonic() < deadline and not stopped.is_set():
            status = self._status(min(deadline, time.monotonic() + _STOP_POLL_S))
        lines = self._err.read_text(errors="replace").strip().splitlines()
        return Said(status=status, out=self._out.read_bytes(), last_line=lines[-1].strip() if lines else "")

    def _status(self, until: float) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=max(0.0, until - time.monotonic()))
        return None

    def kill(self) -> None:
        """Kill the process group, so that a driver tool goes too, and descendants that have a group of their own."""
        descendants = self._descendants() if self._process.poll() is None else ()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in descendants:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def reap(self) -> None:
        # A process in uninterruptible sleep inside a driver can't be reaped now; init does it when it wakes.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_REAP_S)

    def _descendants(self) -> tuple[int, ...]:
        import psutil  # rarely needed, and every probe would pay for it

        with suppress(psutil.NoSuchProcess):
            return tuple(process.pid for process in psutil.Process(self._process.pid).children(recursive=True))
        return ()
