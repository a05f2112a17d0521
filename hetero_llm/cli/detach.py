"""``serve --detach``: the same command again as a background process, watched until it is ready or has failed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hetero_llm.cli import render
from hetero_llm.cli.keeping import already_running
from hetero_llm.cluster import state
from hetero_llm.errors import EngineFailed, ErrorReport, from_report
from hetero_llm.model import from_data

NAME_ENV = "HETERO_LLM_DETACHED_NAME"
"""Set for the background process: it is the detached one, and this is the name of its record."""

POLL_S = 0.1
STOP_DEADLINE_S = 120.0


def record_name(model: str) -> str:
    """Return a name for a record that is unique on the machine and readable."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", model.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
    return f"{stem[:40]}-{os.getpid()}"


def log_path(name: str) -> Path:
    """Return where a detached `serve` writes; the folder exists."""
    return state.logs_dir() / f"{name}.log"


def start_detached(argv: Sequence[str], name: str) -> state.ServeRecord:
    """Run ``hetero-llm`` with `argv` in the background and return its record once it is ready.

    Its output goes to `log_path`, and to this process's stderr while it starts. Ctrl-C here stops it.

    Raises:
        HeteroError: what the background process failed with.
    """
    path = log_path(name)
    path.write_bytes(b"")
    # Appended to: should two start under one name, neither writes over what the other says.
    with path.open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "hetero_llm.cli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, NAME_ENV: name},
        )
    render.say(f"log: {path}")
    try:
        return _wait(child, name, path)
    except BaseException:
        _stop(child)
        raise


def _wait(child: subprocess.Popen[bytes], name: str, path: Path) -> state.ServeRecord:
    with path.open(encoding="utf-8", errors="replace") as log:
        while True:
            ended = child.poll() is not None
            _copy(log.read())
            record = state.read_record(name)
            if record is not None and record.pid != child.pid:
                if ended and state.is_alive(record):
                    raise already_running(name)  # another command took the name a moment earlier
                record = None
            if record is not None and record.ready and not ended:
                return record
            if ended:
                raise from_report(_failure(record, child.returncode, path))
            time.sleep(POLL_S)


def _copy(text: str) -> None:
    # The Ready block and the error are printed by this process itself, at the end.
    for line in text.splitlines():
        if line.startswith("["):
            render.say(line)


def _failure(record: state.ServeRecord | None, status: int, path: Path) -> ErrorReport:
    if record is not None:
        state.remove_record(record.name)
    if record is not None and record.error is not None:
        report = from_data(dict(record.error), ErrorReport)
        return report if report.log else ErrorReport(report.code, report.message, report.cause, report.next, str(path))
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return ErrorReport(
        EngineFailed.code,
        f"the background process ended with status {status} before it was ready",
        cause=lines[-1].strip() if lines else None,
        log=str(path),
    )


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
