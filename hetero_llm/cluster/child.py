"""A child process with its output read line by line and its whole tree stopped at the end.

Threads, not asyncio: a Ray actor runs user code on a loop that is not in the main thread, where asyncio's child
watchers and signal handling do not work everywhere.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

KEEPER = Path(__file__).with_name("keeper.py")

END_DEADLINE_S = 5.0
"""Time the keeper gets to kill what is left."""

LAST_LINES_S = 5.0
"""Time the output of a tree that has ended may take to be read; milliseconds."""


class ChildProcess:
    """A started child, in the caller's process group.

    A keeper between the two sees to it that the whole tree is gone when this process is, also where no Ray is left to
    do it: see `hetero_llm.cluster.keeper`.
    """

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
            stdin: give the child a pipe as standard input (`stdin`), else /dev/null.
            cores: logical CPUs to pin the child and all it starts to; empty for no pinning.
            pass_fds: file descriptors the child inherits.

        Raises:
            OSError: the program cannot be started.
        """
        self._life, theirs = socket.socketpair()
        pinned = ",".join(map(str, cores))
        try:
            with theirs:
                self._keeper = subprocess.Popen(
                    [sys.executable, "-I", "-S", str(KEEPER), str(theirs.fileno()), pinned, *argv],
                    env=dict(env),
                    stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=(*pass_fds, theirs.fileno()),
                )
            self._pid = self._started(argv[0])
        except BaseException:
            self._life.close()
            raise
        self._reader = threading.Thread(target=self._read, args=(on_line,), name="child-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id of the root of the tree: the program itself."""
        return self._pid

    @property
    def stdin(self) -> IO[bytes]:
        """The child's standard input, when one was asked for."""
        assert self._keeper.stdin is not None
        return self._keeper.stdin

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the child or anything it started runs."""
        return self._keeper.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the child's end; return its exit code, or None after `timeout_s`. All output has been read then."""
        try:
            code = self._keeper.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        # Whatever still holds the pipe then sleeps inside a driver, and is not waited for.
        self._reader.join(LAST_LINES_S)
        self._life.close()
        return code

    def tree(self) -> tuple[psutil.Process, ...]:
        """Return the living processes of the tree, root first, those whose parent died included."""
        if self._keeper.poll() is not None:
            return ()
        with suppress(psutil.NoSuchProcess):
            processes = psutil.Process(self._keeper.pid).children(recursive=True)
            return tuple(sorted(filter(_alive, processes), key=lambda process: process.pid != self._pid))
        return ()

    def terminate(self) -> None:
        """Send SIGTERM to the root and return at once; nothing happens when it has ended."""
        self._keeper.terminate()

    def stop(self, grace_s: float) -> None:
        """End the whole tree: SIGTERM to the root, SIGKILL to what is left after `grace_s`. Safe to call twice."""
        self.terminate()
        if self.wait(grace_s) is None:
            self._life.close()
            if self.wait(END_DEADLINE_S) is None:
                # The keeper itself hangs, or one of its children in the kernel. The root dies with the keeper.
                self._keeper.kill()
                self.wait()
        if self._keeper.stdin:
            with suppress(BrokenPipeError):
                self._keeper.stdin.close()

    def _started(self, program: str) -> int:
        """Return the process id the keeper says."""
        with self._life.makefile("r") as words:
            word = words.readline().strip()
        if word.isdigit():
            return int(word)
        self._keeper.communicate()
        if not word:
            raise OSError(f"the keeper of {program} ended before it started it")
        number = int(word.removeprefix("error "))
        raise OSError(number, os.strerror(number), program)

    def _read(self, on_line: Callable[[str], None]) -> None:
        stream = self._keeper.stdout
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
