"""``hetero-llm stop``: end models, and with the last one its `serve` and cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option
from hetero_llm.errors import ClusterUnreachable, ModelNotServed, NotRunning, UsageError

if TYPE_CHECKING:
    from hetero_llm.cluster.state import ServeRecord

END_DEADLINE_S = 120.0
POLL_S = 0.1


@click.command(cls=Verb)
@click.argument("model", required=False)
@click.option("--all", "every", is_flag=True, help="Stop every model served from this machine.")
@address_option
def command(model: str | None, every: bool, address: str | None) -> int:
    """Stop a model: its replicas finish what they answer and end.

    When it was the last one, its `serve` ends too, and with it the cluster it started. Returns when all is gone.
    Without MODEL the only one that is served is stopped.
    """
    from hetero_llm.cluster.state import live_records

    if model is not None and every:
        raise UsageError("give a model or --all, not both")
    before = live_records()
    if every and address is None and not os.environ.get("RAY_ADDRESS"):
        return _stop_everything(before)
    _stop_models(model, every, address)
    _wait_for_ends(before)
    return 0


def _stop_everything(records: Sequence[ServeRecord]) -> int:
    if not records:
        raise NotRunning("nothing is being served from this machine", next=("hetero-llm serve",))
    for record in records:
        # The supervisor takes down what it started; this works too while the cluster is still coming up, or is stuck.
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    _wait_gone({record.name for record in records})
    render.say(f"stopped {', '.join(name for record in records for name in record.models or (record.name,))}")
    return 0


def _stop_models(model: str | None, every: bool, address: str | None) -> None:
    from hetero_llm.cluster.session import connect

    session = connect(address)  # before Ray is imported: with nothing running the answer comes at once
    from hetero_llm.cluster.deploy import delete_model, snapshot

    try:
        served = [entry.name for entry in snapshot(session).models]
        for name in served if every else [_chosen(model, served)]:
            delete_model(session, name)
            render.say(f"stopped {name}")
    finally:
        session.close()


def _chosen(model: str | None, served: Sequence[str]) -> str:
    if not served:
        raise NotRunning("no model is served")
    if model is None and len(served) > 1:
        raise UsageError(
            f"{len(served)} models are served; name one, or say --all",
            next=tuple(f"hetero-llm stop {name}" for name in served),
        )
    if model is not None and model not in served:
        raise ModelNotServed(f"model {model!r} is not served; served: {', '.join(served)}", next=("hetero-llm status",))
    return model or served[0]


def _wait_for_ends(records: Iterable[ServeRecord]) -> None:
    """Wait for each `serve` that has lost its last model: it is ending its cluster now."""
    for record in records:
        # One that is still coming up had no model to lose; without an address another cluster would be asked.
        if record.address and record.models and not _still_serves(record):
            _wait_gone({record.name})


def _still_serves(record: ServeRecord) -> bool:
    """Return whether a model of this `serve` is left; one whose cluster does not answer any more serves nothing."""
    from hetero_llm.cluster.session import connect

    try:
        session = connect(record.address)
        from hetero_llm.cluster.deploy import snapshot

        try:
            left = {entry.name for entry in snapshot(session).models}
        finally:
            session.close()
    except (ClusterUnreachable, NotRunning):
        return False
    return bool(left & set(record.models))


def _wait_gone(names: set[str]) -> None:
    from hetero_llm.cluster.state import live_records

    give_up_s = time.monotonic() + END_DEADLINE_S
    while left := [record for record in live_records() if record.name in names]:
        if time.monotonic() > give_up_s:
            raise ClusterUnreachable(
                f"serve (process {left[0].pid}) has not ended within {END_DEADLINE_S:.0f} s",
                next=(f"kill {left[0].pid}",),
                log=left[0].log,
            )
        time.sleep(POLL_S)
