"""Keeper of a child: no process of it outlives the one that wanted it, whatever becomes of that one.

Run as a file, with the standard library only: ``python -I -S keeper.py LIFE CORES PROGRAM ARGUMENT…``. `ChildProcess`
is the other side. LIFE is the number of an inherited socket. The keeper writes one line to it, the program's process id
or ``error ERRNO``, and takes its end as the end of the starter: all is killed then. Every descendant is found, because
the kernel gives orphans to the keeper. After the program's end the rest of its tree is killed, and the keeper ends the
way the program did: with its exit code, or by its signal.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

# From linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Handled, not ignored: the program would inherit that. SIGINT and SIGHUP of a terminal reach it by themselves."""

LAST_WORDS_S = 1.0
"""Time the rest of a tree gets after its root ended by itself: a worker may still be printing what went wrong."""

KILL_DEADLINE_S = 4.0
"""Time what was killed gets to be gone, less than `ChildProcess` waits for the keeper."""

_KILL_POLL_S = 0.005

_libc = ctypes.CDLL(None, use_errno=True)


def main(life: int, cores: str, argv: list[str]) -> int:
    """Keep the program `argv`, pinned to `cores` (comma-separated, empty for no pinning); return its exit code."""
    os.set_inheritable(life, False)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker)
    for number in HANDLED:
        signal.signal(number, lambda *_: None)
    try:
        root = subprocess.Popen(argv, close_fds=False, preexec_fn=_die_with_keeper)
    except OSError as error:
        _tell(life, f"error {error.errno}")
        return 127
    # Who kills the starter's whole group, as Ray does, must not kill the one who finds what left that group.
    os.setpgid(0, 0)
    _tell(life, f"{root.pid}")
    ended = _keep(root.pid, life, woken)
    _kill_rest()
    if ended < 0:
        _end_by(-ended)
    return ended


def _tell(life: int, word: str) -> None:
    with suppress(BrokenPipeError):  # the starter is gone already; `_keep` notices
        os.write(life, f"{word}\n".encode())


def _keep(root: int, life: int, woken: int) -> int:
    """Return how the program ended (negative for a signal); what is left of its tree may be killed then."""
    ended: int | None = None
    give_up: float | None = None
    while ended is None or _wait_for_words(give_up):
        timeout_s = None if give_up is None else max(0.0, give_up - time.monotonic())
        readable, _, _ = select.select([life, woken], [], [], timeout_s)
        if woken in readable and signal.SIGTERM in os.read(woken, 4096) and ended is None:
            os.kill(root, signal.SIGTERM)
        for pid, code in _reaped():
            if pid == root:
                ended, give_up = code, time.monotonic() + (LAST_WORDS_S if code >= 0 else 0.0)
        if life in readable:
            return ended if ended is not None else -signal.SIGKILL
    return ended


def _wait_for_words(give_up: float | None) -> bool:
    return bool(_children()) and give_up is not None and time.monotonic() < give_up


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield process id and exit code of the children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


def _kill_rest() -> None:
    """Kill children until none is left; the children of each become this process's as it dies.

    One that sleeps inside a sick driver dies when it wakes. It is left to init: that the rest ended must be known.
    """
    give_up = time.monotonic() + KILL_DEADLINE_S
    while (children := _children()) and time.monotonic() < give_up:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        time.sleep(_KILL_POLL_S)
        for _ in _reaped():
            pass


def _children() -> list[int]:
    """Return the process ids of this process's children, ended ones that are not reaped included."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and _parent(name) == os.getpid():
            found.append(int(name))
    return found


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            # pid (name) state ppid …; the name may contain anything.
            return int(stat.read().rpartition(b")")[2].split()[1])
    except OSError:  # it is gone, or somebody else's that may not be seen
        return None


def _die_with_keeper() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_by(number: int) -> None:
    """End this process by signal `number`, without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
