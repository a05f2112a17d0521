"""Make Ray nodes of this machine known that something else started: Ray's autoscaler, KubeRay, `ray start`."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_llm.cluster.plain_nodes import PlainNode, plain_nodes
from hetero_llm.errors import NodeUnknown
from hetero_llm.model import NodeInventory
from hetero_llm.scheduler.resources import explicit_resources


def adopt_nodes(here: Sequence[NodeInventory], native: Mapping[str, str | None]) -> tuple[NodeInventory, ...]:
    """Publish what this machine has for those of its Ray nodes that nobody registered; return what was published.

    The caller is connected to the cluster. A Ray node carries one kind: the one whose resources it was started with.

    Args:
        here: this machine's devices, one entry per kind.
        native: kind → Ray resource that hands out its device ids.

    Raises:
        NodeUnknown: no such Ray node is on this machine, or its resources are those of no kind.
        NodeNameTaken: another living node has the name.
    """
    from hetero_llm.cluster.controller import start_scheduler
    from hetero_llm.cluster.nodes import publish_node, published_nodes

    known = {node.ray_node_id for node in published_nodes().nodes if node.ray_node_id}
    found = [node for node in plain_nodes(known) if node.hostname == socket.gethostname()]
    if not found:
        raise NodeUnknown("every Ray node of this machine is registered already", next=("hetero-llm node list",))
    pairs = [(plain, _matching(plain, here, native)) for plain in found]
    start_scheduler()
    adopted = tuple(
        replace(node, address=plain.address, ray_node_id=plain.ray_node_id, labels=plain.user_labels)
        for plain, node in pairs
    )
    for node in adopted:
        publish_node(node)
    return adopted


def _matching(plain: PlainNode, here: Sequence[NodeInventory], native: Mapping[str, str | None]) -> NodeInventory:
    for node in here:
        # Ray leaves resources of amount zero out.
        wanted = {name: amount for name, amount in explicit_resources((node,), native).items() if amount}
        if node.devices and wanted == plain.resources:
            return node
    has = ", ".join(f"{name}={amount:g}" for name, amount in plain.resources.items()) or "no accelerator"
    kinds = [node.kind for node in here if node.devices] or ["KIND"]
    raise NodeUnknown(
        f"the Ray node at {plain.address} was started with {has}: those are the resources of no kind of this machine",
        next=tuple(
            f'start it with what "hetero-llm node env --kind {kind}" prints in its environment' for kind in kinds
        ),
    )
