"""What is running on this machine, kept as one small file per `serve`, lab or node, readable without Ray.

A record is only a pointer (process id, address, URL). Its truth is the process: a record whose process is gone is
removed by whoever reads it next.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import platformdirs
import psutil

from hetero_llm.cluster import lease
from hetero_llm.errors import FolderUnusable

RAY_DIR_PREFIX = "hetero-ray-"
"""How the temporary folders of our own Ray clusters are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRecord:
    """One `hetero-llm serve`, or another command that keeps a cluster or nodes of one up.

    Attributes:
        name: file name of the record, unique on the machine.
        role: ``serve``, ``lab`` or ``node``.
        pid: the supervising process.
        address: Ray address of its cluster, empty until it is up.
        temp_dir: Ray's temporary folder, made by this command.
        token: file with the cluster's token; None means ``token`` in `temp_dir`.
        nodes: names of the nodes this command keeps up, where it is not a `serve`.
        url: base URL of the gateway, None until it listens.
        shapes: model to a word on its replicas, ``2 x cuda tp=1 (simulated)``.
        ready: every replica asked for has generated a token.
        log: output of a detached `serve`, None in the foreground.
        error: the ErrorReport it ended with, as builtins.
    """

    name: str
    pid: int
    pid_created_unix_s: float
    started_unix_s: float
    role: str = "serve"
    address: str = ""
    temp_dir: str | None = None
    token: str | None = None
    nodes: tuple[str, ...] = ()
    url: str | None = None
    models: tuple[str, ...] = ()
    shapes: Mapping[str, str] = field(default_factory=dict)
    ready: bool = False
    log: str | None = None
    error: Mapping[str, Any] | None = None


def state_dir() -> Path:
    """Return the folder for records and logs: ``HETERO_LLM_STATE_DIR`` or the user's state folder. It exists.

    Raises:
        FolderUnusable: it cannot be made.
    """
    return _made(_state_path())


def logs_dir() -> Path:
    """Return the folder for logs, below `state_dir`. It exists.

    Raises:
        FolderUnusable: it cannot be made.
    """
    return _made(_state_path() / "logs")


def new_record(name: str, *, started_unix_s: float, log: str | None = None, role: str = "serve") -> ServeRecord:
    """Return a record for the calling process."""
    me = psutil.Process()
    return ServeRecord(
        name=name, pid=me.pid, pid_created_unix_s=me.create_time(), started_unix_s=started_unix_s, role=role, log=log
    )


def write_record(record: ServeRecord) -> None:
    """Write `record` so that a reader sees the old or the new one, never half of it.

    Raises:
        FolderUnusable: it cannot be written.
    """
    path = _record_path(record.name)
    with _written_as(record, path) as draft:
        draft.replace(path)


def claim_record(record: ServeRecord) -> bool:
    """Write `record` unless a living process has one of this name; return whether it was written.

    Raises:
        FolderUnusable: it cannot be written.
    """
    known = read_record(record.name)
    if known is not None:
        if is_alive(known):
            return False
        _remove_after(known)
    path = _record_path(record.name)
    with _written_as(record, path) as draft:
        try:
            path.hardlink_to(draft)  # the one step of which only one of two can succeed
        except FileExistsError:
            return False
    return True


def update_record(record: ServeRecord, **changes: Any) -> ServeRecord:
    """Write and return `record` with `changes`."""
    changed = replace(record, **changes)
    write_record(changed)
    return changed


def remove_record(name: str) -> None:
    """Remove a record; nothing happens when it is gone already."""
    _record_path(name).unlink(missing_ok=True)


def read_record(name: str) -> ServeRecord | None:
    """Return a record by name, alive or not; None when there is none.

    One that is no record, as a full disk or a lost power supply leaves it, is removed: it must not stop every command.
    """
    path = _record_path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServeRecord)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError:
        path.unlink(missing_ok=True)
        return None
    except OSError as error:
        raise _unusable(path, error) from error


def live_records() -> tuple[ServeRecord, ...]:
    """Return the records of each `serve` that lives, oldest first; records of dead processes are removed."""
    return tuple(record for record in all_live_records() if record.role == "serve")


def running_clusters() -> dict[str, ServeRecord]:
    """Return the clusters this machine takes part in by address: of several records of one, the one with its token."""
    known: dict[str, ServeRecord] = {}
    for record in all_live_records():
        if record.address and (record.address not in known or token_path(known[record.address]) is None):
            known[record.address] = record
    return known


def token_path(record: ServeRecord) -> str | None:
    """Return the file with the token of a record's cluster; None when this machine does not keep it."""
    return record.token or (str(Path(record.temp_dir) / "token") if record.temp_dir else None)


def all_live_records() -> tuple[ServeRecord, ...]:
    """Return the records of all living processes, whatever their role, oldest first."""
    alive = []
    for path in _records_path().glob("*.json"):
        record = read_record(path.stem)
        if record is None:
            continue
        if is_alive(record):
            alive.append(record)
        else:
            _remove_after(record)
    return tuple(sorted(alive, key=lambda record: record.started_unix_s))


def _remove_after(record: ServeRecord) -> None:
    """Remove what a killed `serve` could not: its record, its engines' shared memory, Ray's folder with the token."""
    remove_record(record.name)
    lease.sweep()
    if record.temp_dir and Path(record.temp_dir).name.startswith(RAY_DIR_PREFIX):
        shutil.rmtree(record.temp_dir, ignore_errors=True)


def is_alive(record: ServeRecord) -> bool:
    """Return whether the record's process still runs; a reused process id does not count."""
    try:
        process = psutil.Process(record.pid)
        return abs(process.create_time() - record.pid_created_unix_s) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _state_path() -> Path:
    override = os.environ.get("HETERO_LLM_STATE_DIR")
    return Path(override) if override else platformdirs.user_state_path("hetero-llm")


def _records_path() -> Path:
    return _state_path() / "serve"


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


@contextmanager
def _written_as(record: ServeRecord, path: Path) -> Iterator[Path]:
    """Write `record` to a draft next to `path`, which is gone afterwards."""
    draft = _made(path.parent) / f"{path.stem[:80]}.{record.pid}.tmp"
    try:
        draft.write_bytes(msgspec.json.encode(record))
        yield draft
    except OSError as error:
        raise _unusable(path, error) from error
    finally:
        draft.unlink(missing_ok=True)


def _unusable(path: Path, error: OSError) -> FolderUnusable:
    return FolderUnusable(
        f"cannot use {path}",
        cause=error.strerror or str(error),
        next=("set HETERO_LLM_STATE_DIR to a folder you may write", "hetero-llm doctor"),
    )


def _record_path(name: str) -> Path:
    return _records_path() / f"{name}.json"
