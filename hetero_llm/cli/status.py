"""``hetero-llm status``: the running replicas."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option, output_option
from hetero_llm.cli.phases import phase_text
from hetero_llm.errors import ModelNotServed
from hetero_llm.model import ModelEntry, ReplicaStatus, RoutingTable, to_data

WATCH_S = 2.0


@click.command(cls=Verb)
@click.argument("model", required=False)
@click.option("--watch", is_flag=True, help="Show it again every two seconds until Ctrl-C.")
@address_option
@output_option
def command(model: str | None, watch: bool, address: str | None, output: render.Format) -> int:
    """Show the running replicas, of all models or of one."""
    from hetero_llm.cluster.session import connect

    session = connect(address)  # before Ray is imported: with nothing running the answer comes at once
    from hetero_llm.cluster.deploy import snapshot

    try:
        while True:
            table = _of_model(snapshot(session), model)
            render.show(output, to_data(table), _model_table(table), _replica_table(table.replicas))
            if not watch:
                return 0
            time.sleep(WATCH_S)
    finally:
        session.close()


def _of_model(table: RoutingTable, model: str | None) -> RoutingTable:
    if model is None:
        return table
    models = tuple(entry for entry in table.models if entry.name == model)
    if not models:
        served = ", ".join(entry.name for entry in table.models) or "none"
        raise ModelNotServed(f"model {model!r} is not served here; served: {served}", next=("hetero-llm status",))
    return RoutingTable(
        version=table.version,
        models=models,
        targets=tuple(target for target in table.targets if target.model == model),
        replicas=tuple(status for status in table.replicas if status.model == model),
        notes={name: note for name, note in table.notes.items() if name == model},
    )


def _model_table(table: RoutingTable) -> render.Table:
    rows = tuple(_model_row(entry, table) for entry in table.models)
    columns = ("model", "source", "kinds", "ready", "replicas", "max model len", "note")
    return render.Table(columns, rows, empty="no model is deployed")


def _model_row(entry: ModelEntry, table: RoutingTable) -> tuple[object, ...]:
    ready = sum(target.model == entry.name for target in table.targets)
    replicas = sum(status.model == entry.name for status in table.replicas)
    note = table.notes.get(entry.name)
    return (entry.name, entry.source, entry.kinds, ready, replicas, entry.max_model_len, note)


def _replica_table(replicas: Iterable[ReplicaStatus]) -> render.Table:
    where = ("replica", "model", "kind", "accelerator", "node", "state")
    columns = (*where, "tp", "pp", "devices", "cores", "endpoint", "running", "waiting", "error")
    return render.Table(columns, tuple(_replica_row(status) for status in replicas), empty="no replica exists")


def _replica_row(status: ReplicaStatus) -> tuple[object, ...]:
    accelerator = render.marked(status.accelerator, status.simulated)
    where = (status.replica, status.model, status.kind, accelerator, status.node, phase_text(status))
    shape = (status.tp, status.pp, status.devices, status.cores or None)
    error = status.error.get("message") if status.error else None
    return (*where, *shape, status.endpoint, status.running, status.waiting, error)
