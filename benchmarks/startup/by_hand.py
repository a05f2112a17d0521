"""The engine alone, started with the very command a replica used, until it has generated one token."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import clock
from benchmarks.served import READY_DEADLINE_S, Void
from benchmarks.workplace import Workplace, stop

HEALTH_POLL_S = 0.1
"""As often as a replica asks."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """How an engine was started.

    Attributes:
        argv: program and arguments.
        env: the whole environment.
        cores: logical CPUs it and all its threads may use.
        host: address its HTTP server listens on.
        served_name: model name to ask for.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cores: tuple[int, ...]
    host: str
    served_name: str

    @classmethod
    def of(cls, pid: int) -> EngineCommand:
        """Read it from a running engine: /proc/PID/{cmdline,environ} are what it was given at its start."""
        process = psutil.Process(pid)
        argv = tuple(process.cmdline())
        return cls(
            argv=argv,
            env=dict(process.environ()),
            cores=tuple(process.cpu_affinity() or ()),
            host=_after(argv, "--host"),
            served_name=_after(argv, "--served-model-name"),
        )

    def on_port(self, port: int) -> tuple[str, ...]:
        """Return the arguments with another port."""
        at = self.argv.index("--port") + 1
        return (*self.argv[:at], str(port), *self.argv[at + 1 :])


def time_by_hand(command: EngineCommand, workplace: Workplace) -> float:
    """Start the engine, return the seconds to its first generated token, end it.

    Raises:
        Void: it ended, could not generate, or took more than `READY_DEADLINE_S`.
    """
    port = _free_port(command.host)
    scratch = workplace.root / "t" / f"hand-{port}"
    scratch.mkdir()
    log = workplace.root / f"hand-{port}.log"
    started_s = clock.now_s()
    with log.open("wb") as out:
        engine = subprocess.Popen(
            command.on_port(port),
            env={**command.env, "TMPDIR": str(scratch)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        psutil.Process(engine.pid).cpu_affinity(list(command.cores))
        _wait_token(engine, command, port, log)
        return clock.now_s() - started_s
    finally:
        stop(engine, signal.SIGTERM)
        _end_rest_of(engine.pid)


def _wait_token(engine: subprocess.Popen[bytes], command: EngineCommand, port: int, log: Path) -> None:
    give_up_s = clock.now_s() + READY_DEADLINE_S
    while _request(command.host, port, "GET", "/health", None) != 200:
        if engine.poll() is not None or clock.now_s() > give_up_s:
            raise Void(f"the engine started by hand is not ready:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(HEALTH_POLL_S)
    body = json.dumps({"model": command.served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
    if (status := _request(command.host, port, "POST", "/v1/completions", body)) != 200:
        raise Void(f"the engine started by hand answers its first request with {status}")


def _request(host: str, port: int, method: str, path: str, body: str | None) -> int:
    """Return the status of the answer, read to its end; 0 when nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=READY_DEADLINE_S if body else 5.0)
    try:
        connection.request(method, path, body, {"content-type": "application/json"} if body else {})
        response = connection.getresponse()
        response.read()
        return response.status
    except OSError:
        return 0
    finally:
        connection.close()


def _end_rest_of(session: int) -> None:
    # The engine's workers end with it; one that does not must not disturb the next run.
    rest = [process for process in psutil.process_iter() if _session_of(process.pid) == session]
    for process in rest:
        process.kill()
    psutil.wait_procs(rest, timeout=5.0)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def _after(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]
