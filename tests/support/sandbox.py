"""A place of its own for one or more `hetero-llm` commands, and the check that they left nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import httpx
import psutil

MARK = "HETERO_TEST_MARK"
"""Every process started from a sandbox inherits it, engines and Ray's own included."""

READY_DEADLINE_S = 280.0


class Sandbox:
    """Own state, leases, cache and temporary folder; commands run in it are found again by their mark."""

    def __init__(self, cache: Path, *, engines: bool = True):
        """Make the folders.

        Args:
            cache: converted models.
            engines: real vLLM engines run in it. What they leave in /dev/shm does not tell whose it is; without them
                it is somebody else's.
        """
        # Short: Ray and vLLM put Unix sockets under it, whose paths are limited to 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="ht-", dir="/tmp"))
        self.tmp = self.root / "t"
        self.tmp.mkdir()
        self.mark = uuid.uuid4().hex
        self.netns: str | None = None
        """Network namespace commands run in; None for the machine's own network."""
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("HETERO_LLM_", "RAY_"))},
            "HETERO_LLM_STATE_DIR": str(self.root / "state"),
            "HETERO_LLM_LEASE_DIR": str(self.root / "lease"),
            "HETERO_LLM_CACHE_DIR": str(cache),
            "TMPDIR": str(self.tmp),
            "NO_COLOR": "1",
            MARK: self.mark,
            # Engines put it into the names of their shared memory, which is how ours is told from that of others.
            "HETERO_ENGINE_SHM_PREFIX": self.mark[:8],
        }
        self._shm_before = _shared_memory()
        self._engines = engines
        self._started: list[Serve] = []
        self._background: list[subprocess.Popen[bytes]] = []

    def run(self, *args: str, timeout_s: float = 120.0, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a `hetero-llm` command to its end."""
        return subprocess.run(
            [*within(self.netns), sys.executable, "-m", "hetero_llm.cli", *args],
            env={**self.env, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def json(self, *args: str, timeout_s: float = 120.0, **env: str) -> dict:
        """Run a reading verb with ``-o json`` and return its `data`."""
        done = self.run(*args, "-o", "json", timeout_s=timeout_s, **env)
        assert done.stdout, done.stderr
        answer = json.loads(done.stdout)
        assert answer["schema"] == 1
        return answer.get("data", answer)

    def serve(self, *args: str, env: Mapping[str, str] | None = None) -> Serve:
        """Start `hetero-llm serve` in the background, on a port the system chooses."""
        serve = Serve(self, args, dict(env or {}))
        self._started.append(serve)
        return serve

    def start(
        self, *args: str, cores: str | None = None, netns: str | None = None, **env: str
    ) -> subprocess.Popen[bytes]:
        """Start a `hetero-llm` command in the background; its words go to ``<verb>-….err`` in the sandbox.

        `cores` (``0,1``) are all it may use; a CPU node has only those. `netns` is the network it is in.
        """
        log = self.root / f"{args[0]}-{uuid.uuid4().hex[:6]}.err"
        pinned = ("taskset", "-c", cores) if cores else ()
        argv = [*within(netns or self.netns), *pinned, sys.executable, "-m", "hetero_llm.cli", *args]
        with log.open("wb") as out:
            started = subprocess.Popen(
                argv,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._background.append(started)
        return started

    def processes(self) -> list[psutil.Process]:
        """Return the living processes that carry this sandbox's mark."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def leftovers(self, deadline_s: float = 5.0) -> list[str]:
        """Return what is still there `deadline_s` after everything should have ended."""
        end = time.monotonic() + deadline_s
        while (left := self._left()) and time.monotonic() < end:
            time.sleep(0.2)
        return left

    def close(self) -> None:
        """End what a failed test left running and remove the files."""
        for serve in self._started:
            serve.end()
        for process in self.processes():
            process.kill()
        for started in self._background:
            started.wait()
        shutil.rmtree(self.root, ignore_errors=True)

    def _left(self) -> list[str]:
        left = [f"process {p.pid} {' '.join(p.cmdline())[:100]}" for p in self.processes()]
        left += [f"file {path}" for path in self.tmp.iterdir()]
        left += [
            f"lease {path.name}: {path.read_text()}" for path in (self.root / "lease").glob("*") if path.stat().st_size
        ]
        left += [f"record {path.name}" for path in (self.root / "state" / "serve").glob("*.json")]
        new = {name for name in _shared_memory() - self._shm_before if self.mark[:8] in name or self._vllm(name)}
        left += [f"shared memory {name}" for name in new if _unused(name)]
        return left

    def _vllm(self, name: str) -> bool:
        return self._engines and name.startswith("vllm")


class Serve:
    """A running `hetero-llm serve`."""

    def __init__(self, sandbox: Sandbox, args: tuple[str, ...], env: dict[str, str]):
        self.sandbox = sandbox
        self.started_s = time.monotonic()
        self.out = sandbox.root / f"serve-{uuid.uuid4().hex[:6]}.out"
        self.err = self.out.with_suffix(".err")
        before, dashes, engine = args, (), ()
        if "--" in args:
            at = args.index("--")
            before, dashes, engine = args[:at], ("--",), args[at + 1 :]
        program = (*within(sandbox.netns), sys.executable, "-m", "hetero_llm.cli")
        argv = [*program, "serve", *before, "--port", "0", "-o", "json", *dashes, *engine]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            # A session of its own, so that `interrupt` can do what a terminal does: signal the whole group.
            self.process = subprocess.Popen(
                argv,
                env={**sandbox.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.err.read_text()

    def wait_ready(self) -> dict:
        """Return the Ready block's data; fails with the log when the command ends first."""
        end = time.monotonic() + READY_DEADLINE_S
        while time.monotonic() < end:
            text = self.out.read_text()
            if text.endswith("}\n"):
                self.ready = json.loads(text)["data"]
                return self.ready
            assert self.process.poll() is None, f"serve ended with {self.process.returncode}:\n{self.log}"
            time.sleep(0.2)
        raise AssertionError(f"not ready after {READY_DEADLINE_S} s:\n{self.log}")

    def error(self) -> dict:
        """Return the error the command ended with."""
        return json.loads(self.out.read_text())["error"]

    @property
    def url(self) -> str:
        return self.ready["url"]

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120.0, **options)

    def replicas(self) -> list[dict]:
        """Return the status of all replicas, from the gateway."""
        with self.client() as client:
            return client.get("/status").json()["data"]["replicas"]

    def wait_for_log(self, text: str, deadline_s: float = 120.0) -> None:
        end = time.monotonic() + deadline_s
        while text not in self.log:
            running = self.process.poll() is None and time.monotonic() < end
            assert running, f"no {text!r} in:\n{self.log}"
            time.sleep(0.1)

    def interrupt(self) -> None:
        """Do what Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float = 90.0) -> int:
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def within(netns: str | None) -> tuple[str, ...]:
    """Return the words that run what follows them in a network namespace."""
    return ("ip", "netns", "exec", netns) if netns else ()


def engine_tree(actor_pid: int) -> list[psutil.Process]:
    """Return all processes below a replica actor: its engine's tree."""
    return psutil.Process(actor_pid).children(recursive=True)


def _shared_memory() -> set[str]:
    """Return the segments of multiprocessing and vLLM on this machine."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "vllm", "sem.mp-"))}


def _unused(name: str) -> bool:
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if name in maps.read_text():
                return False
        except OSError:
            continue
    return True
