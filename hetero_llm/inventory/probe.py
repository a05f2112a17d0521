"""Ask a backend for its devices in a process of its own, with a deadline.

Vendor libraries hang on sick drivers, print to stdout, and crash. None of that may reach the caller: here it ends as a
`Problem`, and the other kinds answer as if nothing had been. The child is this module, run with ``python -m``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from hetero_llm.errors import DiscoveryFailed, DiscoveryTimedOut
from hetero_llm.model import Problem, from_data, to_data
from hetero_llm.plugin import Discovery
from hetero_llm.plugin.manager import load_plugins

DEADLINE_S = 10.0
_REAP_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one backend answered: its devices and, as far as known, the versions of its software."""

    discovery: Discovery
    versions: Mapping[str, str | None] = field(default_factory=dict)


def probe_kind(kind: str, deadline_s: float = DEADLINE_S) -> Discovery:
    """Return the devices of `kind`; a time-out or a crash is one problem (HL202, HL203) and no device."""
    return probe_kinds((kind,), deadline_s)[kind].discovery


def probe_kinds(
    kinds: Iterable[str], deadline_s: float = DEADLINE_S, environ: Mapping[str, str] = os.environ
) -> dict[str, Probe]:
    """Probe all `kinds` at the same time, with `environ`; the deadline holds for each from the common start.

    Never raises for what a backend does. When this is interrupted, every child is killed with its process group.
    """
    deadline = time.monotonic() + deadline_s
    with tempfile.TemporaryDirectory(prefix="hetero-llm-probe-") as folder:
        children: dict[str, _Child] = {}
        try:
            for kind in kinds:
                children[kind] = _Child(kind, Path(folder), environ)
            return {kind: child.result(deadline, deadline_s) for kind, child in children.items()}
        finally:
            for child in children.values():
                child.kill()


class _Child:
    """One running probe. Output goes to files: a grandchild that keeps a pipe open could block a reader for ever."""

    def __init__(self, kind: str, folder: Path, environ: Mapping[str, str]) -> None:
        self._kind = kind
        self._stdout, self._stderr = folder / f"{kind}.stdout", folder / f"{kind}.stderr"
        with self._stdout.open("wb") as out, self._stderr.open("wb") as err:
            self._process = _start(kind, out, err, environ)

    def result(self, deadline: float, deadline_s: float) -> Probe:
        try:
            code = self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return self._timed_out(deadline_s)
        if code != 0:
            return self._failed(f"ended by signal {-code}" if code < 0 else f"exit status {code}")
        return self._answer()

    def kill(self) -> None:
        """Kill the child's process group, so that a driver tool it called goes too."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # A process in uninterruptible sleep inside a driver can't be reaped now; init does it when it wakes.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_REAP_S)

    def _answer(self) -> Probe:
        try:
            probe = from_data(msgspec.json.decode(self._stdout.read_bytes()), Probe)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            return self._failed(f"its answer cannot be read: {error}")
        if any(device.stand_in for device in probe.discovery.devices):
            # Only an override, which the user wrote, may put another engine in the place of a kind's own.
            text = f"discovery of {self._kind!r} names a stand-in engine, which only an override may do"
            return self._problem(DiscoveryFailed.code, text)
        return probe

    def _timed_out(self, deadline_s: float) -> Probe:
        text = f"discovery of {self._kind!r} did not answer within {deadline_s:g} s"
        last = self._last_line()
        return self._problem(DiscoveryTimedOut.code, f"{text}; last said: {last}" if last else text)

    def _failed(self, how: str) -> Probe:
        text = f"discovery of {self._kind!r} failed: {self._last_line() or how}"
        return self._problem(DiscoveryFailed.code, text)

    def _problem(self, code: str, text: str) -> Probe:
        doctor = (f"hetero-llm doctor {self._kind}",)
        return Probe(discovery=Discovery(problems=(Problem(kind=self._kind, code=code, text=text, next=doctor),)))

    def _last_line(self) -> str:
        lines = self._stderr.read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


def _start(kind: str, out: IO[bytes], err: IO[bytes], environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "hetero_llm.inventory.probe", kind]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environ), process_group=0)


def main(kind: str) -> None:
    """Print the `Probe` of `kind` as JSON. What libraries print to stdout meanwhile goes to stderr."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    backend = load_plugins().backend(kind)
    probe = Probe(discovery=backend.discover(), versions=dict(backend.versions()))
    with os.fdopen(answer_fd, "wb") as answer:
        answer.write(msgspec.json.encode(to_data(probe)))


if __name__ == "__main__":
    main(sys.argv[1])
