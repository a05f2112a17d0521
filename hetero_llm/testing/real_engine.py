"""Run what a backend says to run, for level 2: an engine until it has generated a token, a pre-flight to its end."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero_llm.plugin import SHM_PREFIX_ENV, EngineLaunch, GroupSetup
from hetero_llm.plugin.rootcause import find_root_cause

_STOP_GRACE_S = 15.0
_LEFT_OUT = ("RAY_", "HETERO_LLM_", "OMP_NUM_THREADS")
_LAST_LINES = 40


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RunningEngine:
    """An engine started as hetero-llm starts it, in a process group of its own."""

    def __init__(self, launch: EngineLaunch, port: int, folder: Path) -> None:
        self._launch, self._port, self._log = launch, port, folder / "engine.log"
        # Both short: names of shared memory and paths of Unix sockets are limited, and engines add to them.
        self._shm_prefix, self._scratch = secrets.token_hex(4), tempfile.mkdtemp(prefix="hetero-")
        own = {SHM_PREFIX_ENV: self._shm_prefix, "TMPDIR": self._scratch}
        try:
            self._process = self._start({**_environment(launch.env_remove), **own, **launch.env})
        except OSError:
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        if launch.cores:
            # One that ended at once has no cores any more; `first_token` tells why.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(self._process.pid, launch.cores)

    def _start(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            return subprocess.Popen(
                self._launch.argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )

    def first_token(self, served_name: str) -> int:
        """Wait for the server, ask for one token, and return how many were generated.

        Raises:
            AssertionError: the engine ended, did not answer, or not in time; the root cause is in the message.
        """
        deadline = time.monotonic() + self._launch.start_deadline_s
        body = json.dumps({"model": served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
        while not self._up():
            assert self._process.poll() is None, f"the engine ended with {self._process.poll()}: {self.why()}"
            assert time.monotonic() < deadline, f"not up after {self._launch.start_deadline_s:g} s: {self.why()}"
            time.sleep(0.2)
        status, answer = self._request("POST", "/v1/completions", body, deadline - time.monotonic())
        assert status == 200, f"the engine is up and answers {status}: {answer[:500]!r}; {self.why()}"
        return int(json.loads(answer)["usage"]["completion_tokens"])

    def log_lines(self) -> list[str]:
        """Return what the engine printed so far."""
        return self._log.read_text(errors="replace").splitlines()

    def why(self) -> str:
        """Return the root cause found in the log, and its last lines."""
        lines = self.log_lines()
        cause = find_root_cause(lines, self._launch.root_causes)
        return "\n".join((cause.message if cause else "no cause was found in its log", *lines[-_LAST_LINES:]))

    def stop(self) -> None:
        """End the engine and everything it started."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._scratch, ignore_errors=True)
        for segment in Path("/dev/shm").glob(f"*{self._shm_prefix}*"):
            segment.unlink(missing_ok=True)

    def _up(self) -> bool:
        try:
            return self._request("GET", self._launch.health_path, None, 5.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _request(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=max(1.0, timeout_s))
        try:
            connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@contextmanager
def running(launch: EngineLaunch, port: int, folder: Path) -> Iterator[RunningEngine]:
    """Run an engine while entered; its log is in `folder`, its scratch files and shared memory are removed."""
    engine = RunningEngine(launch, port, folder)
    try:
        yield engine
    finally:
        engine.stop()


def run_preflight(setup: GroupSetup, deadline_s: float, folder: Path) -> list[tuple[int | None, str]]:
    """Run the pre-flight of all ranks at once; return exit status (None: killed at the deadline) and output of each."""
    assert setup.preflight_argv is not None
    ranks: list[tuple[subprocess.Popen[bytes], Path]] = []
    try:
        for number, env in enumerate(setup.rank_env):
            said = folder / f"rank-{number}.log"
            with said.open("wb") as output:
                process = subprocess.Popen(
                    setup.preflight_argv,
                    env={**_environment(setup.env_remove), **env},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            ranks.append((process, said))
        deadline = time.monotonic() + deadline_s
        return [(_status(process, deadline), said.read_text(errors="replace")) for process, said in ranks]
    finally:
        for process, _ in ranks:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _status(process: subprocess.Popen[bytes], deadline: float) -> int | None:
    try:
        return process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None


def _environment(removed: tuple[str, ...]) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in removed and not k.startswith(_LEFT_OUT)}
