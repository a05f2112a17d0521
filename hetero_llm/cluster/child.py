"""A child process with its output read line by line and its whole tree stopped at the end.

Threads, not asyncio: a Ray actor runs user code on a loop that is not in the main thread, where asyncio's child
watchers and signal handling do not work everywhere.
"""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import psutil


class ChildProcess:
    """A started child. It stays in the caller's process group, so Ray reaps it when the actor dies."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        on_line: Callable[[str], None],
        stdin: bool = False,
        cores: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
    ):
        """Start `argv`; `on_line` gets each line of stdout and stderr, from a thread of this object.

        Args:
            argv: program and arguments.
            env: the whole environment of the child.
            on_line: called with each line, without its end.
            stdin: give the child a pipe as standard input (`process.stdin`), else /dev/null.
            cores: logical CPUs to pin the child and all it starts to; empty for no pinning.
            pass_fds: file descriptors the child inherits.
        """
        self.process = subprocess.Popen(
            list(argv),
            env=dict(env),
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=tuple(pass_fds),
        )
        self._descendants: dict[int, psutil.Process] = {}
        if cores:
            # Before the interpreter of the child has started any thread; children and threads inherit it.
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self.process.pid).cpu_affinity(list(cores))
        self._reader = threading.Thread(target=self._read, args=(on_line,), name="child-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the root of the tree."""
        return self.process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the child runs."""
        return self.process.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the child's end; return its exit code, or None after `timeout_s`. All output has been read then."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        # Grandchildren may keep the pipe open; their output is not waited for.
        self._reader.join(1.0)
        return code

    def tree(self) -> tuple[psutil.Process, ...]:
        """Return the living processes of the tree, root first. Also remembers them for `stop`.

        A descendant whose parent died is adopted by init and would no longer be found from the root; it is found
        because an earlier call has seen it.
        """
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                self._descendants.setdefault(process.pid, process)
        return tuple(process for process in self._descendants.values() if _alive(process))

    def stop(self, grace_s: float) -> None:
        """End the whole tree: SIGTERM to the root, SIGKILL to what is left after `grace_s`. Safe to call twice."""
        self.tree()
        if self.exit_code() is None:
            self.process.terminate()
            self.wait(grace_s)
        survivors = self.tree()
        for process in survivors:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(survivors, timeout=5.0)
        self.process.wait()
        self._reader.join(1.0)
        if self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.close()

    def _read(self, on_line: Callable[[str], None]) -> None:
        stream = self.process.stdout
        assert stream is not None
        with stream:
            for raw in stream:
                on_line(raw.decode("utf-8", "replace").rstrip("\r\n"))


def _alive(process: psutil.Process) -> bool:
    try:
        # is_running() compares the creation time, so a reused process id is not taken for ours.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
