"""Runs a program that may get stuck in a sick driver, and comes back in time whatever happens to it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_REAP_S = 0.5


def run(argv: Sequence[str], env: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[bytes]:
    """Return exit status, standard output and standard error of a program that reads nothing.

    It stays in this process's group, so that who ends the group ends it too.

    Raises:
        subprocess.TimeoutExpired: it was still running after `timeout_s`, and was killed.
        OSError: it cannot be started.
    """
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(argv, env=dict(env), stdin=nothing, stdout=pipe, stderr=pipe)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        _end(process)
    return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        # One that sleeps inside the driver cannot be reaped now; init does it when it wakes.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_REAP_S)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
