"""One engine as a child process: start it, follow its log, know when it can generate, end it without a trace."""

from __future__ import annotations

import http.client
import json
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from hetero_llm.cluster.child import ChildProcess
from hetero_llm.cluster.lease import remove_shm
from hetero_llm.errors import EngineFailed, EngineNotReady
from hetero_llm.plugin import SHM_PREFIX_ENV, EngineLaunch, RootCausePattern
from hetero_llm.plugin.rootcause import find_root_cause

LOG_LINES_KEPT = 20_000
"""Lines searched for a root cause. An engine prints some hundreds while starting."""

LOG_BYTES_MAX = 64 << 20
"""Size at which the log is moved to ``*.1`` and begun anew."""

GENERATE_DEADLINE_S = 600.0
"""Longest time one completion asked through the actor may take."""

STOP_GRACE_S = 5.0
"""Time an engine gets to end by itself after SIGTERM."""

DEATH_GRACE_S = 10.0
"""Time a failing engine gets to print its reason and exit before it is judged by what it said so far."""

HEALTH_TIMEOUT_S = 2.0
"""Longest wait for an answer of the health route; a start that is no longer wanted waits for it too."""

_IN_FLIGHT = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:{[^}]*})? (\S+)$", re.MULTILINE)

_NOT_FOR_ENGINES = re.compile(r"^(RAY_|OMP_NUM_THREADS$|HETERO_LLM_)")
# Ray sets OMP_NUM_THREADS=1 in actors that reserve no CPU; left in place it would slow every engine down.


class EngineProcess:
    """A running engine. Not thread-safe except for the read-only properties."""

    def __init__(
        self,
        launch: EngineLaunch,
        *,
        replica: str,
        address: tuple[str, int],
        served_name: str,
        log_path: Path,
        hints: Sequence[RootCausePattern] = (),
        pass_fds: Sequence[int] = (),
    ):
        """Start the engine.

        Args:
            launch: what the backend wants started.
            replica: replica id, for messages.
            address: host and port of the engine's HTTP server.
            served_name: model name to use for the readiness token.
            log_path: file that gets every line of the engine's output.
            hints: root-cause patterns of plugins, tried after the backend's own.
            pass_fds: lease files the engine keeps open.

        Raises:
            EngineFailed: the program cannot be started at all.
        """
        self.log_path = log_path
        self.facts: dict[str, int] = {}
        self.phase = "starting"
        self.phase_since = time.monotonic()
        self._launch = launch
        self._patterns = (*launch.root_causes, *hints)
        self._replica = replica
        self._address = address
        self._served_name = served_name
        self._lines: deque[str] = deque(maxlen=LOG_LINES_KEPT)
        self._log_lock = threading.Lock()
        self._shm: set[str] = set()
        self.shm_prefix = os.environ.get(SHM_PREFIX_ENV, "") + secrets.token_hex(4)
        # Short, because engines put Unix sockets there and their paths are limited to 107 bytes.
        self.scratch = tempfile.mkdtemp(prefix="hetero-")
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("wb")
        try:
            self._child = ChildProcess(
                launch.argv, env=self._environment(), on_line=self._on_line, cores=launch.cores, pass_fds=pass_fds
            )
        except (OSError, ValueError) as error:
            shutil.rmtree(self.scratch, ignore_errors=True)
            self._log.close()
            raise EngineFailed(
                f"engine of {replica} cannot be started: {launch.argv[0]}",
                cause=str(error),
                next=("check the backend's installation: hetero-llm doctor",),
            ) from error

    @property
    def pid(self) -> int:
        """Process id of the root of the engine's tree."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """Return the engine's exit code, or None while it runs."""
        return self._child.exit_code()

    def wait(self) -> None:
        """Block until the engine's root process has ended."""
        self._child.wait()

    def processes(self) -> tuple[psutil.Process, ...]:
        """Return the engine's living processes, root first."""
        return self._child.tree()

    def shared_memory(self) -> tuple[str, ...]:
        """Return names of the /dev/shm segments the engine's processes map or have mapped."""
        for process in self.processes():
            with suppress(OSError):
                self._shm.update(_mapped_shm(process.pid))
        return tuple(sorted(self._shm))

    def wait_ready(self, stopping: threading.Event) -> None:
        """Block until the engine has generated one real token.

        A server that answers its health route can still be unable to generate, so the token decides.

        Raises:
            EngineFailed: the engine ended, or could not generate; the message is the root cause from its log.
            EngineNotReady: the deadline of the launch passed.
        """
        deadline = time.monotonic() + self._launch.start_deadline_s
        while not self._healthy(deadline):
            self._check_alive()
            if stopping.wait(0.1):
                raise EngineNotReady(f"{self._replica} was stopped while it was {self.phase}")
            if time.monotonic() > deadline:
                raise self._too_late()
        self._enter("generating the first token")
        self._generate_one(deadline)
        self._enter("ready")

    def requests_in_flight(self) -> int | None:
        """Return requests the engine runs or queues, from its metrics (vLLM's names); None when it does not say."""
        try:
            status, text = self._request("GET", "/metrics", None, 5.0)
        except (OSError, http.client.HTTPException):
            return None
        values = [float(value) for value in _IN_FLIGHT.findall(text.decode("utf-8", "replace"))]
        return int(sum(values)) if status == 200 and values else None

    def complete(self, body: bytes) -> tuple[int, bytes]:
        """Post a completion request and return status and answer; OSError when the engine does not answer."""
        return self._request("POST", "/v1/completions", body, GENERATE_DEADLINE_S)

    def failure(self) -> EngineFailed:
        """Return why the engine ended, from its log. Call after `exit_code` is not None."""
        code = self._child.wait(DEATH_GRACE_S)
        ended = _how_it_ended(code)
        with self._log_lock:
            cause = find_root_cause(tuple(self._lines), self._patterns)
        if cause is None:
            last = next((line for line in reversed(self._lines) if line.strip()), "it printed nothing")
            return EngineFailed(
                f"engine of {self._replica} {ended} while {self.phase}",
                cause=last.strip(),
                next=(f"hetero-llm logs {self._replica}",),
                log=str(self.log_path),
            )
        return EngineFailed(
            cause.message,
            cause=f"engine of {self._replica} {ended} while {self.phase}",
            next=(*cause.next, f"hetero-llm logs {self._replica}"),
            log=str(self.log_path),
        )

    def stop(self) -> None:
        """End the engine's whole tree and remove its scratch folder and shared memory. Safe to call twice."""
        self.shared_memory()
        self._child.stop(STOP_GRACE_S)
        remove_shm(self._shm, self.shm_prefix)
        shutil.rmtree(self.scratch, ignore_errors=True)
        with self._log_lock:
            self._log.close()

    def _environment(self) -> Mapping[str, str]:
        removed = set(self._launch.env_remove)
        env = {k: v for k, v in os.environ.items() if k not in removed and not _NOT_FOR_ENGINES.match(k)}
        return {**env, "TMPDIR": self.scratch, SHM_PREFIX_ENV: self.shm_prefix, **self._launch.env}

    def _on_line(self, line: str) -> None:
        with self._log_lock:
            if self._log.closed:
                return
            if self._log.tell() > LOG_BYTES_MAX:
                self._log.close()
                self.log_path.replace(self.log_path.with_suffix(self.log_path.suffix + ".1"))
                self._log = self.log_path.open("wb")
            self._log.write(line.encode() + b"\n")
            self._log.flush()
            self._lines.append(line)
        if self.phase == "ready":
            return
        for marker in self._launch.phases:
            if marker.pattern.search(line):
                self._enter(marker.phase)
        for fact in self._launch.facts:
            if found := fact.pattern.search(line):
                self.facts[fact.name] = int(found.group(1).replace(",", ""))

    def _enter(self, phase: str) -> None:
        if phase != self.phase:
            self.phase, self.phase_since = phase, time.monotonic()

    def _check_alive(self) -> None:
        if self.exit_code() is not None:
            raise self.failure()

    def _healthy(self, deadline: float) -> bool:
        timeout_s = min(HEALTH_TIMEOUT_S, max(0.1, deadline - time.monotonic()))
        try:
            return self._request("GET", self._launch.health_path, None, timeout_s)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _generate_one(self, deadline: float) -> None:
        body = json.dumps({"model": self._served_name, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
        try:
            status, answer = self._request("POST", "/v1/completions", body, max(1.0, deadline - time.monotonic()))
        except TimeoutError:
            raise self._too_late() from None
        except (OSError, http.client.HTTPException) as error:
            status, answer = 0, str(error).encode()
        if status == 200:
            return
        if self._child.wait(DEATH_GRACE_S) is not None:
            raise self.failure()
        raise EngineFailed(
            f"engine of {self._replica} started but cannot generate (HTTP {status})",
            cause=answer[:500].decode("utf-8", "replace"),
            next=(f"hetero-llm logs {self._replica}",),
            log=str(self.log_path),
        )

    def _request(self, method: str, path: str, body: str | bytes | None, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(*self._address, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"content-type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _too_late(self) -> EngineNotReady:
        return EngineNotReady(
            f"engine of {self._replica} generated no token within {self._launch.start_deadline_s:.0f} s",
            cause=f"it was {self.phase} for the last {time.monotonic() - self.phase_since:.0f} s",
            next=("hetero-llm serve … --start-timeout-s SECONDS", f"hetero-llm logs {self._replica}"),
            log=str(self.log_path),
        )


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    if code < 0:
        return f"was ended by signal {-code}"
    return f"exited with code {code}"


def _mapped_shm(pid: int) -> set[str]:
    prefix = "/dev/shm/"
    with Path(f"/proc/{pid}/maps").open() as maps:
        paths = (line.split(maxsplit=5)[5].strip() for line in maps if prefix in line)
        return {path.removeprefix(prefix).removesuffix(" (deleted)") for path in paths}
