"""Commands that keep nodes of a cluster up until they are told to stop: `lab up`, `node start`, `node join`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from hetero_llm.cli import render
from hetero_llm.cli.signals import StopSignals
from hetero_llm.cluster import state
from hetero_llm.errors import AlreadyRunning, ExitCode, HeteroError
from hetero_llm.model import to_data

WATCH_POLL_S = 0.5


class Kept(Protocol):
    """What is kept up."""

    def start(self) -> Mapping[str, Any]:
        """Bring it up; return what its record says from then on."""

    def check(self) -> bool:
        """Return whether it is still to be kept up; raise HeteroError when it fell apart."""

    def end(self) -> None:
        """Take it down, however far it came."""


def keep_up(kept: Kept, record: state.ServeRecord, signals: StopSignals) -> int:
    """Bring `kept` up, watch until a signal comes or it has done its duty, and take it down; others see `record`.

    Raises:
        AlreadyRunning: a living process has a record of this name.
        HeteroError: it did not come up, or fell apart.
    """
    failure: HeteroError | None = None
    claimed = False
    try:
        claimed = state.claim_record(record)
        if not claimed:
            raise already_running(record.name)
        with signals.deferred():
            changes = kept.start()
            record = state.update_record(record, **changes)
        record = state.update_record(record, ready=True)  # not when it was stopped meanwhile
        while kept.check():
            time.sleep(WATCH_POLL_S)
        return ExitCode.OK
    except HeteroError as error:
        failure = error
        raise
    finally:
        signals.hold()
        try:
            kept.end()
        finally:
            if claimed:
                _end_record(record, failure)


def already_running(name: str) -> AlreadyRunning:
    """Return the error for a record that another process has."""
    record = state.read_record(name)
    role = record.role if record else name
    return AlreadyRunning(
        f"a {role} runs on this machine already: {name}",
        cause=f"process {record.pid}" if record else None,
        next=("hetero-llm lab down",) if role == "lab" else ("hetero-llm node list", "hetero-llm node leave"),
    )


def wait_gone(record: state.ServeRecord, deadline_s: float) -> int:
    """Wait until the process of `record` has ended; return the exit code of the command that asked for it."""
    give_up_s = time.monotonic() + deadline_s
    while state.is_alive(record):
        if time.monotonic() > give_up_s:
            render.say(f"process {record.pid} has not ended within {deadline_s:.0f} s: kill {record.pid}")
            return ExitCode.FAILURE
        time.sleep(0.1)
    return ExitCode.OK


def _end_record(record: state.ServeRecord, failure: HeteroError | None) -> None:
    if failure is not None and record.log is not None:
        state.update_record(record, error=to_data(failure.report))  # for the command that waits
    else:
        state.remove_record(record.name)
