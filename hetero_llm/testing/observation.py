"""A backend seen from outside: imported and asked in a process of its own, which reports what that did to it.

The process is this module's neighbour `hetero_llm.testing.child`. The same things are never looked at in the process
of the tests, where other tests have loaded libraries and a hanging driver would take them along.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import psutil

from hetero_llm.model import from_data, to_data
from hetero_llm.plugin import Check, Device, DeviceUsage, Discovery

DISCOVERY_DEADLINE_S = 10.0
"""Time hetero-llm gives the discovery of a kind; a later answer is not waited for."""

WHOLE_DEADLINE_S = 120.0
"""Time for everything a backend is asked; discovery has the shorter one above."""

_REAP_S = 5.0

MARK_ENV = "HETERO_CONTRACT_MARK"
"""Variable that marks the process and all it starts, so that what it leaves behind is found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the process of its own saw.

    Attributes:
        errors: what was asked (``import``, ``discover``, ``versions``, ``usage``, ``doctor``, ``round trip``,
            ``commands``) to the traceback it ended with; what went well is not in it.
        import_modules: vendor and engine libraries that importing the plugin loaded.
        import_libraries: shared libraries that importing the plugin opened with ctypes.
        import_variables: environment variables that importing the plugin set or removed.
        command_variables: environment variables that making an engine's command set or removed.
        discovery: the first answer of `discover`.
        again: the second answer.
        discover_s: seconds the first answer took.
        modules: engine libraries loaded after everything was asked.
        open_devices: files under /dev still open after everything was asked.
    """

    errors: Mapping[str, str] = field(default_factory=dict)
    import_modules: tuple[str, ...] = ()
    import_libraries: tuple[str, ...] = ()
    import_variables: tuple[str, ...] = ()
    command_variables: tuple[str, ...] = ()
    discovery: Discovery | None = None
    again: Discovery | None = None
    discover_s: float | None = None
    versions: Mapping[str, str | None] | None = None
    usage: tuple[DeviceUsage, ...] | None = None
    checks: tuple[Check, ...] | None = None
    modules: tuple[str, ...] = ()
    open_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hanging:
    """How a backend whose driver hangs behaved.

    Attributes:
        answer: what it reported, None when it had to be killed.
        seconds: how long it took until it answered or was killed.
        left_behind: command lines of processes still there after its process group was killed.
    """

    answer: Observation | None
    seconds: float
    left_behind: tuple[str, ...]


@cache
def observe(backend: str) -> Observation:
    """Import ``module:Class`` in a process of its own, ask it everything, and return what was seen.

    Raises:
        AssertionError: the process did not come to its end, by itself or in time.
    """
    return _answer_of(backend, _run(backend, "everything", WHOLE_DEADLINE_S))


def observe_commands(backend: str, devices: Sequence[Device]) -> Observation:
    """Ask for variables, group and engine on `devices` in a process of its own, and return what that did to it.

    Raises:
        AssertionError: the process did not come to its end, by itself or in time.
    """
    return _answer_of(backend, _run(backend, "commands", WHOLE_DEADLINE_S, devices))


def _answer_of(backend: str, run: _Run) -> Observation:
    if run.answer is None:
        raise AssertionError(f"asking {backend} in a process of its own: {run.ending}; it said:\n{run.said}")
    return run.answer


def observe_hanging(backend: str, deadline_s: float = DISCOVERY_DEADLINE_S) -> Hanging:
    """Ask for the devices only, as hetero-llm does: killed with its process group at the deadline."""
    run = _run(backend, "discover", deadline_s)
    return Hanging(answer=run.answer, seconds=run.seconds, left_behind=run.left_behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    answer: Observation | None
    ending: str
    said: str
    seconds: float
    left_behind: tuple[str, ...]


def _run(backend: str, what: str, deadline_s: float, devices: Sequence[Device] = ()) -> _Run:
    with tempfile.TemporaryDirectory(prefix="hetero-llm-contract-") as folder:
        answer, said = Path(folder) / "answer.json", Path(folder) / "said"
        mark, words = folder, [what]
        if devices:
            held = Path(folder) / "devices.json"
            held.write_bytes(msgspec.json.encode(to_data(tuple(devices))))
            words.append(str(held))
        # What the tests can import, the process can, whether it is installed or found by a path of pytest's. A path
        # that a fake has put into the environment goes first.
        paths = (os.environ.get("PYTHONPATH", ""), *sys.path)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), MARK_ENV: mark}
        argv = [sys.executable, "-m", "hetero_llm.testing.child", backend, str(answer), *words]
        started_s = time.monotonic()
        with said.open("wb") as output:
            process = subprocess.Popen(
                argv, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
            )
        ending = _end(process, deadline_s)
        seconds = time.monotonic() - started_s
        return _Run(
            answer=_read(answer),
            ending=ending,
            said=said.read_text(errors="replace"),
            seconds=seconds,
            left_behind=_left_behind(mark),
        )


def _end(process: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Wait for the end of `process`, at most until the deadline; return how it ended. Nothing of its group is left."""
    try:
        return f"it ended with status {process.wait(deadline_s)}"
    except subprocess.TimeoutExpired:
        return f"it did not end within {deadline_s:g} s"
    finally:
        # Also after an answer, and when the tests are interrupted: a tool it called may still be there.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # One that sleeps inside a driver can't be reaped now; it shows as left behind.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)


def _read(path: Path) -> Observation | None:
    if not path.exists():
        return None
    return from_data(msgspec.json.decode(path.read_bytes()), Observation)


def _left_behind(mark: str) -> tuple[str, ...]:
    """Return the command lines of living processes that carry `mark`; a killed one gets a moment to be gone."""
    end = time.monotonic() + 5.0
    while (found := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.05)
    lines = tuple(" ".join(_cmdline(process)) for process in found)
    for process in found:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return lines


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(MARK_ENV) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return [f"process {process.pid}"]
