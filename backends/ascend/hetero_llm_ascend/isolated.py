"""Runs one source in a process of its own: vendor libraries hang on sick drivers, crash, and print what they like.

The child is this module, ``python -m hetero_llm_ascend.isolated dcmi``. Its environment lacks the visible-devices
variable, so that the numbers it reports are those of the whole machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import msgspec

from hetero_llm.plugin import bounded
from hetero_llm_ascend import visible
from hetero_llm_ascend.chip import Failure, Reading

_DOCTOR = ("hetero-llm doctor ascend",)


def read(source: str, deadline_s: float) -> Reading:
    """Return what the source says; a hang, a crash or an exception is its `Failure`, in one line."""
    env = {name: value for name, value in os.environ.items() if name != visible.VARIABLE}
    env["PYTHONPATH"] = os.pathsep.join(_import_path())
    argv = (sys.executable, "-m", "hetero_llm_ascend.isolated", source)
    try:
        done = bounded.run(argv, env, deadline_s)
    except subprocess.TimeoutExpired:
        return _failed(source, f"{source} did not answer within {deadline_s:.1f} s")
    if done.returncode != 0:
        return _failed(source, _how_it_ended(source, done))
    try:
        return msgspec.json.decode(done.stdout, type=Reading)
    except msgspec.DecodeError as error:
        return _failed(source, f"the answer of {source} cannot be read: {error}")


def load_error(library: str, deadline_s: float = 10.0) -> str | None:
    """Return why the loader cannot load a shared library, in its words; None when it can."""
    argv = (sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library)
    try:
        done = bounded.run(argv, os.environ, deadline_s)
    except subprocess.TimeoutExpired:
        return f"loading did not end within {deadline_s:.0f} s"
    if done.returncode == 0:
        return None
    return _last_line(done).removeprefix("OSError: ") or f"loading ended with status {done.returncode}"


def _import_path() -> list[str]:
    """Return where the child finds what this process found, and what the user's own variable names."""
    here = str(Path(__file__).parent.parent)
    return [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _how_it_ended(source: str, done: subprocess.CompletedProcess[bytes]) -> str:
    last = _last_line(done)
    if done.returncode > 0:
        return f"{source} failed: {last or f'exit status {done.returncode}'}"
    return f"{source} failed: ended by signal {-done.returncode}" + (f"; last said: {last}" if last else "")


def _last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""


def _failed(source: str, text: str) -> Reading:
    return Reading(source=source, failure=Failure(text=text, next=_DOCTOR))


def main(source: str) -> None:
    """Print the `Reading` of a source as JSON. What libraries print to standard output meanwhile goes to stderr."""
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    reading: Reading = import_module(f"hetero_llm_ascend.{source}").read()
    with os.fdopen(answer_fd, "wb") as answer:
        answer.write(msgspec.json.encode(reading))


if __name__ == "__main__":
    main(sys.argv[1])
