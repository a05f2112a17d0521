"""One Ray node as a child process that lives exactly as long as the process that started it.

The child is this module, run with ``python -m``. It reads a `RayletSpec` from its standard input, answers with one
line, and leaves the cluster when the input ends. The kernel ends it too when the starter is killed, so that nothing is
left behind then either.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from hetero_llm.cluster.state import RAY_DIR_PREFIX
from hetero_llm.errors import ClusterStartFailed

if TYPE_CHECKING:
    from hetero_llm.cluster.ray_private import NodeProcesses

START_DEADLINE_S = 90.0
"""Time a node may take to register; 3 s on an idle machine."""

END_DEADLINE_S = 20.0
"""Time a node gets to leave before it is killed."""

OBJECT_STORE_BYTES = 80 << 20
"""Smallest object store Ray takes is 75 MiB. No model data goes through it."""

FOLDER_ENV = "HETERO_LLM_RAY_FOLDER"
"""Set for a node's processes: its folder. Some of Ray's replace their command line by a title that says nothing."""

LIFE_POLL_S = 0.5
_LOG = "node.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayletSpec:
    """One node to start.

    Attributes:
        name: node name, for messages and Ray's own tools.
        address: ``host:port`` of the cluster to join; None starts a new one, with this node as its head.
        port: where a new cluster listens; 0 for any free port.
        ip: the node's address.
        folder: the node's own, made and removed by it; its parent is removed with the last node in it.
        resources: as `hetero_llm.scheduler.resources.explicit_resources` gives them.
    """

    name: str
    address: str | None = None
    port: int = 0
    ip: str
    folder: str
    resources: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    object_store_bytes: int = OBJECT_STORE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a node's process answers: where it is, or why not."""

    ray_node_id: str = ""
    address: str = ""
    error: str | None = None


class Raylet:
    """A node's process, seen from the one that starts it. Call `wait_started`, and `end` in every case."""

    def __init__(self, spec: RayletSpec, environ: Mapping[str, str]):
        """Start the process and return at once; workers of the node inherit `environ`."""
        self.name = spec.name
        self._folder = Path(spec.folder)
        self._started: Started | None = None
        self._folder.mkdir(parents=True)
        with (self._folder / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "hetero_llm.cluster.raylet"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**environ, FOLDER_ENV: spec.folder},
                # Ctrl-C in a terminal is for the starter: it ends the nodes in order.
                process_group=0,
            )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended at once; `wait_started` tells why
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        """Id of the node's process; Ray's processes are its children."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, None while the node lives."""
        return self._process.poll()

    def wait_started(self, deadline_s: float = START_DEADLINE_S) -> Started:
        """Return where the node is, once it is registered; at once when called again.

        Raises:
            ClusterStartFailed: it did not come up, or not in time.
        """
        if self._started is None:
            line = self._answer(time.monotonic() + deadline_s)
            if line is None:
                raise self._failure(f"it was not registered after {deadline_s:.0f} s")
            if not line:
                raise self._failure(self._last_words() or "its process ended")
            self._started = msgspec.json.decode(line, type=Started)
        if self._started.error is not None:
            raise self._failure(self._started.error)
        return self._started

    def begin_end(self) -> None:
        """Tell the node to leave and return at once."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it was never able to read
            self._process.stdin.close()

    def end(self, deadline_s: float = END_DEADLINE_S) -> None:
        """Take the node out of the cluster and return when nothing of it runs. Safe to call twice."""
        self.begin_end()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answer(self, deadline: float) -> bytes | None:
        """Return the line the process wrote, empty when it ended without one, None at the deadline."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return None
            return self._process.stdout.readline()

    def _failure(self, cause: str) -> ClusterStartFailed:
        return ClusterStartFailed(f"node {self.name} did not start", cause=cause, next=("hetero-llm doctor",))

    def _last_words(self) -> str | None:
        lines = (self._folder / _LOG).read_text(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else None


def end_all(raylets: Sequence[Raylet]) -> None:
    """End several nodes at the same time."""
    for raylet in raylets:
        raylet.begin_end()
    for raylet in raylets:
        raylet.end()


# -- the child ---------------------------------------------------------------------------------------------------------


class _Leave(SystemExit):
    """The node is to leave; also in the middle of its start."""


def main() -> int:
    """Run one node; return the exit code: 0 when it was told to leave, 1 when it could not start or fell apart."""
    leave = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not leave.is_set():
            leave.set()
            raise _Leave(0)

    signal.signal(signal.SIGTERM, on_signal)
    # The starter may have had its signals blocked, and children inherit that; Ray's must be stoppable.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=RayletSpec)
    answer_fd = os.dup(1)
    os.dup2(2, 1)  # what Ray prints is for the log
    threading.Thread(target=_leave_with_starter, daemon=True).start()
    try:
        return _run(spec, answer_fd, leave)
    finally:
        _remove(Path(spec.folder))


def _run(spec: RayletSpec, answer_fd: int, leave: threading.Event) -> int:
    from hetero_llm.cluster.ray_private import NodeProcesses

    try:
        node = NodeProcesses(
            name=spec.name,
            address=spec.address,
            port=spec.port,
            ip=spec.ip,
            folder=spec.folder,
            resources=spec.resources,
            labels=spec.labels,
            object_store_bytes=spec.object_store_bytes,
        )
    except Exception as error:  # noqa: BLE001  (whatever Ray raises is the answer)
        traceback.print_exc()
        _tell(answer_fd, Started(error=str(error).strip().splitlines()[0] if str(error).strip() else repr(error)))
        return 1
    try:
        _tell(answer_fd, Started(ray_node_id=node.ray_node_id, address=node.address))
        return _watch(node, leave)
    finally:
        leave.set()
        node.end()


def _watch(node: NodeProcesses, leave: threading.Event) -> int:
    while not leave.wait(LIFE_POLL_S):
        if gone := node.dead():
            sys.stderr.write(f"ended by itself: {', '.join(gone)}\n")
            return 1
    return 0


def _tell(fd: int, answer: Started) -> None:
    with suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(answer) + b"\n")


def _leave_with_starter() -> None:
    """Wait for the end of the input: the starter closed it, or is gone."""
    # Not the buffered stream: the interpreter aborts when it ends while a thread is inside it.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _remove(folder: Path) -> None:
    """Remove the node's files, and those of the cluster on this machine when this was its last node here."""
    shutil.rmtree(folder, ignore_errors=True)
    root = folder.parent
    with suppress(FileNotFoundError):
        if root.name.startswith(RAY_DIR_PREFIX) and not any(path.is_dir() for path in root.iterdir()):
            shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
