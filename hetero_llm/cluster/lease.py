"""Device leases: who holds which device of this node, for kinds whose devices Ray does not hand out itself.

One file per device, held by `flock`. The kernel releases it when the last holder of the open file dies, so a crash
never leaves a device taken. The file's content says who holds it and what to sweep up (shared-memory segments, scratch
folder) if that holder dies without cleaning; the content counts only while the lock is held, or for sweeping.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetero_llm.errors import DeviceBusy, FolderUnusable


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseNote:
    """What a lease file says: the holder, and what it will leave behind if it is killed."""

    replica: str
    pid: int
    scratch: str | None = None
    shm: tuple[str, ...] = ()
    shm_prefix: str | None = None


def lease_dir() -> Path:
    """Return this node's lease folder: ``HETERO_LLM_LEASE_DIR``, else one per machine and user. It exists.

    Raises:
        FolderUnusable: it cannot be made.
    """
    override = os.environ.get("HETERO_LLM_LEASE_DIR")
    path = Path(override) if override else Path(tempfile.gettempdir()) / f"hetero-llm-leases-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"cannot use {path}",
            cause=error.strerror or str(error),
            next=("set HETERO_LLM_LEASE_DIR to a folder you may write",),
        ) from error
    return path


class DeviceLease:
    """Devices held by one replica. Use `acquire`; the lease ends with `release` or with the process."""

    def __init__(self, replica: str, files: dict[str, int]):
        self._replica = replica
        self._files = files
        self._lock = threading.Lock()

    @property
    def uids(self) -> tuple[str, ...]:
        """Uids held, in the order they were asked for."""
        return tuple(self._files)

    @property
    def fds(self) -> tuple[int, ...]:
        """Open lock files. A child that inherits them keeps the devices until it dies too; its own children do not."""
        return tuple(self._files.values())

    @classmethod
    def acquire(
        cls, candidates: Sequence[str], count: int, replica: str, *, deadline_s: float, where: Path | None = None
    ) -> DeviceLease:
        """Take `count` of the `candidates` (uids), the first free ones in their order.

        Waits up to `deadline_s`: a replica that was just killed may need a moment to let go.

        Raises:
            DeviceBusy: too few are free; the holders are named.
        """
        folder = where or lease_dir()
        give_up = time.monotonic() + deadline_s
        while True:
            files = _lock_first(folder, candidates, count)
            if len(files) == count:
                lease = cls(replica, files)
                lease.note()
                return lease
            for fd in files.values():
                os.close(fd)
            if time.monotonic() >= give_up:
                raise DeviceBusy(
                    f"{replica} needs {count} of {len(candidates)} devices and only {len(files)} are free",
                    cause="; ".join(f"{uid} is held by {who}" for uid, who in holders(candidates, folder).items()),
                    next=("hetero-llm status", "hetero-llm stop MODEL"),
                )
            time.sleep(0.1)

    def note(self, *, scratch: str | None = None, shm: Iterable[str] = (), shm_prefix: str | None = None) -> None:
        """Write down what to sweep if this process is killed."""
        note = LeaseNote(
            replica=self._replica, pid=os.getpid(), scratch=scratch, shm=tuple(sorted(shm)), shm_prefix=shm_prefix
        )
        content = msgspec.json.encode(note)
        with self._lock:  # a number that `release` has closed may mean another file by now
            for fd in self._files.values():
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, len(content))

    def release(self) -> None:
        """Let go of the devices. Safe to call twice."""
        with self._lock:
            files, self._files = self._files, {}
            for fd in files.values():
                os.ftruncate(fd, 0)
                os.close(fd)


def holders(uids: Iterable[str], where: Path | None = None) -> dict[str, str]:
    """Return uid → replica for those of `uids` that are held on this node now."""
    folder = where or lease_dir()
    held = {}
    for uid in uids:
        fd = _open(folder, uid)
        try:
            if not _try_lock(fd):
                note = _read_note(fd)
                held[uid] = note.replica if note else "another process"
        finally:
            os.close(fd)
    return held


def sweep(where: Path | None = None) -> None:
    """Remove what dead holders left behind: their scratch folders and shared-memory segments."""
    folder = where or lease_dir()
    for path in folder.glob("*.lease"):
        fd = _open(folder, path.stem)
        try:
            if _try_lock(fd):
                _sweep_note(fd)
        finally:
            os.close(fd)


def remove_shm(names: Iterable[str], prefix: str | None) -> None:
    """Unlink shared-memory objects by name, and those whose name contains `prefix`; gone ones are fine."""
    shm = Path("/dev/shm")
    for path in {*(shm / name for name in names), *(shm.glob(f"*{prefix}*") if prefix else ())}:
        path.unlink(missing_ok=True)


def _lock_first(folder: Path, candidates: Sequence[str], count: int) -> dict[str, int]:
    files: dict[str, int] = {}
    for uid in candidates:
        if len(files) == count:
            break
        fd = _open(folder, uid)
        if _try_lock(fd):
            _sweep_note(fd)
            files[uid] = fd
        else:
            os.close(fd)
    return files


def _open(folder: Path, uid: str) -> int:
    return os.open(folder / f"{uid.replace('/', '_')}.lease", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_note(fd: int) -> LeaseNote | None:
    content = os.pread(fd, 1 << 16, 0)
    try:
        return msgspec.json.decode(content, type=LeaseNote) if content else None
    except msgspec.DecodeError:
        # Caught between pwrite and ftruncate of a holder that writes right now; it is held either way.
        return None


def _sweep_note(fd: int) -> None:
    note = _read_note(fd)
    if note is None:
        return
    remove_shm(note.shm, note.shm_prefix)
    if note.scratch:
        shutil.rmtree(note.scratch, ignore_errors=True)
    os.ftruncate(fd, 0)
