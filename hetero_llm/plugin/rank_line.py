"""The lines of JSON by which one rank of a pre-flight says how far it is and how it ended, and who writes them."""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import msgspec
import psutil

PHASES = ("start", "variables", "backend", "device", "meeting", "all-reduce", "bandwidth", "leaving", "done")
"""What a rank does, in this order."""

_LONGEST_CAUSE = 800
# Shares of the deadline: torch's own time-outs name the peer, so they come first; whoever waits for this process gives
# up at the deadline, and the cause must have been said before.
_WAIT_SHARE = 0.85
_WATCHDOG_SHARE = 0.93


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """What a rank says about itself, as far as it knows by then.

    Attributes:
        preflight: ``phase`` (one begins), ``passed`` or ``failed``.
        phase: the phase that begins, or in which it failed.
        rank: number within the group; None when its variable is missing.
        node: host name.
        backend: torch.distributed backend asked for, the only one tried.
        device: torch's name of the device, ``cuda:1``.
        device_id: the vendor's identity of the device, where torch tells it.
        interfaces: network interfaces the backend was told to use, else the one the kernel routes by.
        versions: torch, modules that registered the backend, the collective library.
        seconds: time spent per finished phase.
        bandwidth_bytes_per_s: bytes of a vector of 4 MiB over the median time of its all-reduce.
        cause: why it failed, in one line.
    """

    preflight: str
    phase: str
    rank: int | None = None
    node: str = ""
    backend: str
    device: str | None = None
    device_id: str | None = None
    interfaces: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None
    cause: str | None = None


def parse_line(text: str) -> RankLine | None:
    """Return the `RankLine` in a line of a rank's output, None when it is something else."""
    if not text.startswith('{"preflight":'):
        return None
    try:
        return msgspec.json.decode(text, type=RankLine)
    except msgspec.MsgspecError:
        return None


class RankReporter:
    """One rank on its way through the phases: what it knows of itself, its deadline and its end."""

    def __init__(self, backend: str, deadline_s: float) -> None:
        """Begin the phase ``start`` of a process that wants to use `backend` and may take `deadline_s` in all."""
        # The deadline counts from the start of the process, which on a busy machine is well before this line.
        age_s = min(max(0.0, time.time() - psutil.Process().create_time()), deadline_s / 2)
        self._started = self._phase_started = time.monotonic() - age_s
        self._deadline_s = deadline_s
        self._failing = threading.Lock()
        self.line = RankLine(preflight="phase", phase="start", node=socket.gethostname(), backend=backend)

    def left_s(self, share: float = _WAIT_SHARE) -> float:
        """Return the seconds left of a share of the deadline, at least a tenth."""
        return max(0.1, self._started + share * self._deadline_s - time.monotonic())

    def timeout(self) -> timedelta:
        """Return `left_s` as torch takes it."""
        return timedelta(seconds=self.left_s())

    def learn(self, **facts: Any) -> None:
        """Add facts to every later line."""
        self.line = replace(self.line, **facts)

    def enter(self, phase: str) -> None:
        """End the phase before and begin `phase`."""
        self._end_phase(phase)
        _write(sys.stderr.fileno(), self.line)

    def watch(self) -> None:
        """End the process shortly before its deadline, whatever it does by then."""
        watchdog = threading.Timer(self.left_s(_WATCHDOG_SHARE), self._overdue)
        watchdog.daemon = True
        watchdog.start()
        # A library that hangs while it holds the interpreter's lock stops every Python thread, but not this one.
        faulthandler.dump_traceback_later(self.left_s(1.0), exit=True)

    def fail(self, cause: str) -> NoReturn:
        """Print the cause and end the process. The first of two threads that fail is heard."""
        self._failing.acquire()
        _write(sys.stderr.fileno(), replace(self.line, preflight="failed", cause=one_line(cause)))
        # Threads of the library may wait for ranks that never come; nothing here needs an orderly end.
        os._exit(1)

    def succeed(self) -> NoReturn:
        """Print the result and end the process, without the vendor libraries' exit handlers."""
        self._failing.acquire()
        self._end_phase("done")
        _write(sys.stdout.fileno(), replace(self.line, preflight="passed"))
        os._exit(0)

    def _end_phase(self, following: str) -> None:
        now = time.monotonic()
        spent = {**self.line.seconds, self.line.phase: round(now - self._phase_started, 3)}
        self._phase_started = now
        self.learn(phase=following, seconds=spent)

    def _overdue(self) -> None:
        self.fail(f"not done after {time.monotonic() - self._started:.0f} s")


def _write(fd: int, line: RankLine) -> None:
    # Whoever started this rank may be gone; the exit status is all that is left to say then.
    with suppress(BrokenPipeError):
        os.write(fd, msgspec.json.encode(line) + b"\n")


def one_line(text: str) -> str:
    """Return the telling part of a library's error in one line: no C++ stack, and NCCL's last error first.

    NCCL's text is ``… unhandled system error … Last error:`` and then what really happened.
    """
    text = re.split(r"\n?Exception raised from |\n(?:frame )?#0", text, maxsplit=1)[0]
    before, marker, last = text.partition("Last error:")
    if marker and last.strip():
        text = f"{last.strip()} ({before.strip()})"
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_CAUSE else f"{text[: _LONGEST_CAUSE - 1]}…"
