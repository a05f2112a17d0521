"""``hetero-llm devices``: every device of every kind."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option, output_option
from hetero_llm.model import Device, Inventory, NodeInventory, to_data

WATCH_S = 2.0


@click.command(cls=Verb)
@click.option("--watch", is_flag=True, help="Show it again every two seconds until Ctrl-C.")
@address_option
@output_option
def command(watch: bool, address: str | None, output: render.Format) -> int:
    """List every device of every kind: health, memory, and who holds it.

    Shows the running cluster if there is one, else this machine. What was not measured is shown as `-`.
    HETERO_LLM_OVERRIDE_<KIND> pretends to devices: count=2,type=H100-80GB,memory=80GiB; with engine=sim they can be
    served too. The JSON output is what `plan --inventory` takes.
    """
    while True:
        nodes = _nodes(address)
        render.show(output, to_data(Inventory(nodes=nodes)), _table(nodes), *_problem_table(nodes))
        if not watch:
            return 0
        time.sleep(WATCH_S)


def _nodes(address: str | None) -> tuple[NodeInventory, ...]:
    from hetero_llm.cli.machine import cluster_is_known, cluster_nodes, local_nodes
    from hetero_llm.inventory.override import overridden_kinds
    from hetero_llm.plugin.manager import load_plugins

    if cluster_is_known(address) and not overridden_kinds():
        return cluster_nodes(address)
    return local_nodes(load_plugins())


def _table(nodes: Iterable[NodeInventory]) -> render.Table:
    return render.Table(
        ("node", "kind", "accelerator", "index", "uid", "health", "memory", "free", "numa", "cores", "held by"),
        tuple(_row(node, device) for node in nodes for device in node.devices),
        empty="no devices found; `hetero-llm doctor` says why",
    )


def _row(node: NodeInventory, device: Device) -> tuple[object, ...]:
    name = render.marked(device.accelerator, device.simulated)
    memory = (render.size(device.memory_bytes), render.size(device.free_bytes))
    health = str(device.health) if node.alive else "node down"
    place = (device.numa, device.cores or None, device.held_by)
    return (node.node, device.kind, name, device.index, device.uid, health, *memory, *place)


def _problem_table(nodes: Iterable[NodeInventory]) -> Iterable[render.Table]:
    rows = tuple(
        (node.node, problem.kind, problem.code, problem.text, "; ".join(problem.next) or None)
        for node in nodes
        for problem in node.problems
    )
    if rows:
        yield render.Table(("node", "kind", "code", "problem", "next"), rows, title="problems")
