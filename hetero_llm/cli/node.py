"""``hetero-llm node``: this machine as part of a cluster."""

from __future__ import annotations

import json
import os
import shlex
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import F, Verb, address_option, label, output_option
from hetero_llm.errors import ExitCode, NotRunning, UsageError
from hetero_llm.model import to_data

if TYPE_CHECKING:
    from hetero_llm.cluster.plain_nodes import PlainNode
    from hetero_llm.model import NodeInventory

DEFAULT_PORT = 6379
LEAVE_DEADLINE_S = 60.0


@click.group(cls=RichGroup)
def command() -> None:
    """Start a cluster, join one, leave it, list its nodes."""


def _own_labels(ctx: click.Context, param: click.Parameter, given: tuple[tuple[str, str], ...]) -> dict[str, str]:
    from hetero_llm.scheduler.resources import LABEL_PREFIX

    for key, _ in given:
        if key.startswith((LABEL_PREFIX, "ray.io/")):
            raise click.BadParameter(f"{key!r} is given by the cluster itself")
    return dict(given)


def _node_options(function: F) -> F:
    options = (
        click.option("--kind", "kinds", multiple=True, metavar="KIND", help="Only devices of this kind; repeatable."),
        click.option(
            "--label",
            "labels",
            type=label,
            multiple=True,
            callback=_own_labels,
            metavar="KEY=VALUE",
            help="Label models can ask for; may be given several times.",
        ),
        click.option("--address-of-this-node", "ip", metavar="IP", help="Address other nodes reach this one at."),
        click.option(
            "--token-file",
            type=click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True),
            metavar="FILE",
            help="File with the cluster's token. Default: RAY_AUTH_TOKEN_PATH.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@command.command("start", cls=Verb)
@click.option("--head", is_flag=True, help="Start a new cluster; other machines join it.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="0: any free one.")
@_node_options
def start_command(head: bool, port: int, **given: Any) -> int:
    """Start a cluster with this machine as its head, and stay until Ctrl-C.

    One Ray node per kind of device found here. Without --token-file a token is made once and kept in the state folder;
    machines that join need a copy of it.
    """
    from hetero_llm.cli.node_run import Given, run_head

    if not head:
        raise UsageError(
            "node start makes a new cluster and needs --head",
            next=("hetero-llm node start --head", "hetero-llm node join HOST:6379   # to become part of one"),
        )
    return run_head(port, Given(**given))


@command.command("join", cls=Verb)
@click.argument("address", metavar="HOST:PORT")
@_node_options
def join_command(address: str, **given: Any) -> int:
    """Make this machine part of the cluster at HOST:PORT, and stay until Ctrl-C.

    One Ray node per kind of device found here. Ray and Python must be of the head's versions.
    """
    from hetero_llm.cli.node_run import Given, run_join

    return run_join(address, Given(**given))


@command.command("leave", cls=Verb)
@click.argument("name", required=False)
def leave_command(name: str | None) -> int:
    """End a `node start` or `node join` of this machine. Leaving with the head ends the cluster.

    NAME is needed only when several run here.
    """
    from hetero_llm.cli.keeping import wait_gone
    from hetero_llm.cluster.state import all_live_records

    records = [record for record in all_live_records() if record.role == "node"]
    if name is not None:
        records = [record for record in records if name in (record.name, *record.nodes)]
    if not records:
        what = f"no node {name!r}" if name else "no node"
        raise NotRunning(f"{what} of this machine is in a cluster", next=("hetero-llm node list",))
    if len(records) > 1:
        choices = tuple(f"hetero-llm node leave {record.name}   # {', '.join(record.nodes)}" for record in records)
        raise UsageError(f"{len(records)} run on this machine; name one", next=choices)
    with suppress(ProcessLookupError):
        os.kill(records[0].pid, signal.SIGTERM)
    code = wait_gone(records[0], LEAVE_DEADLINE_S)
    if code == ExitCode.OK:
        render.say(f"left: {', '.join(records[0].nodes) or records[0].name}")
    return code


@command.command("list", cls=Verb)
@address_option
@output_option
def list_command(address: str | None, output: render.Format) -> int:
    """List the nodes of the cluster, also Ray nodes that were not started by hetero-llm, with what to do about them."""
    from hetero_llm.cluster.session import connect

    session = connect(address)
    from hetero_llm.cluster.plain_nodes import plain_nodes

    try:
        nodes = session.inventory().nodes
        plain = plain_nodes({node.ray_node_id for node in nodes if node.ray_node_id})
    finally:
        session.close()
    data = {
        "address": session.address,
        "nodes": [{key: value for key, value in to_data(node).items() if key != "problems"} for node in nodes],
        "unregistered": [{**to_data(node), "next": _advice(session.address)} for node in plain],
    }
    render.show(output, data, _table(nodes), *_plain_table(plain, session.address))
    return ExitCode.OK


def _table(nodes: tuple[NodeInventory, ...]) -> render.Table:
    from hetero_llm.cli.machine import devices_text

    rows = tuple(
        (node.node, node.kind, devices_text(node) or None, node.host, node.address, "up" if node.alive else "down")
        for node in nodes
    )
    columns = ("node", "kind", "devices", "host", "address", "state")
    return render.Table(columns, rows, empty="no node with devices; `hetero-llm node join` adds one")


def _plain_table(nodes: tuple[PlainNode, ...], address: str) -> tuple[render.Table, ...]:
    if not nodes:
        return ()
    rows = tuple(
        (
            node.hostname,
            node.address,
            [f"{name}={n:g}" for name, n in node.resources.items()],
            "; ".join(_advice(address)),
        )
        for node in nodes
    )
    return (render.Table(("host", "address", "resources", "next"), rows, title="Ray nodes that are not registered"),)


def _advice(address: str) -> tuple[str, ...]:
    return (
        "on that machine: hetero-llm node adopt",
        f"or: ray stop; hetero-llm node join {address} --token-file FILE",
    )


@command.command("adopt", cls=Verb)
@address_option
def adopt_command(address: str | None) -> int:
    """Register the Ray nodes of this machine that something else started, with what `node env` prints.

    Run it on each such node once Ray is up: on Ray's autoscaler or KubeRay, as the last of the setup commands.
    """
    from hetero_llm.cli.node_run import run_adopt

    run_adopt(address)
    return ExitCode.OK


@command.command("env", cls=Verb)
@click.option("--kind", metavar="KIND", help="The kind this Ray node is for; needed when there are several.")
@output_option
def env_command(kind: str | None, output: render.Format) -> int:
    """Print what Ray must be told of this machine when something else starts it: an autoscaler, KubeRay, `ray start`.

    The variables override what Ray finds by itself. One Ray node carries one kind.
    """
    from hetero_llm.cli.node_run import one_node
    from hetero_llm.plugin.manager import load_plugins
    from hetero_llm.scheduler.resources import explicit_resources, node_labels

    manager = load_plugins()
    node = one_node(manager, kind)
    native = {backend.kind: backend.native_resource for backend in manager.backends()}
    resources = {name: int(amount) for name, amount in explicit_resources((node,), native).items()}
    values = {
        "RAY_OVERRIDE_RESOURCES": json.dumps(resources),
        "RAY_OVERRIDE_LABELS": json.dumps(node_labels(node)),
        "RAY_AUTH_MODE": "token",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",
    }
    if output is render.Format.TABLE:
        for name, value in values.items():
            render.line(f"export {name}={shlex.quote(value)}")
    else:
        render.show(output, {"env": values}, render.Table(("variable", "value"), tuple(values.items())))
    return ExitCode.OK
