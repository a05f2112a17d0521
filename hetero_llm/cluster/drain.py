"""Empty a node without losing a request: Ray places nothing new there, and Serve moves the replicas away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from hetero_llm.cluster.deploy import snapshot
from hetero_llm.cluster.nodes import note_drained, with_holders
from hetero_llm.cluster.pools import ConfiguredModel, pools_now
from hetero_llm.cluster.ray_private import drain_node, head_id
from hetero_llm.cluster.session import Session
from hetero_llm.errors import DrainImpossible, NodeUnknown
from hetero_llm.model import NodeInventory, ReplicaState, ReplicaStatus
from hetero_llm.scheduler.reconcile import places_lacking

POLL_S = 0.5

_HERE = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)


def drain(session: Session, name: str, *, force: bool, progress: Callable[[str], None]) -> tuple[str, ...]:
    """Move every replica off node `name`; each successor is ready before its replica leaves.

    Args:
        force: drain although some replicas have no other place; those stay until they are stopped.
        progress: called with a line whenever something has changed.

    Returns:
        The replicas that stay because they have no other place; none without `force`.

    Raises:
        NodeUnknown: no such node.
        DrainImpossible: it is the head, or a replica has no other place, and not `force`; nothing was changed.
    """
    node = _node(session, name)
    if node.ray_node_id == head_id():
        raise DrainImpossible(
            f"{name} is the head: the scheduler and the gateway live there, and the cluster ends with it",
            next=("hetero-llm stop MODEL", "hetero-llm drain NODE   # another one"),
        )
    homeless = _homeless(session, node)
    if homeless and not force:
        raise DrainImpossible(
            f"{name} cannot be drained: "
            + "; ".join(f"{count} of {app} has no other place" for app, count in homeless),
            next=("hetero-llm stop MODEL", "hetero-llm devices", f"hetero-llm drain {name} --force"),
        )
    assert node.ray_node_id is not None
    note_drained(node.ray_node_id)
    drain_node(node.ray_node_id, "hetero-llm drain")
    said = None
    while left := _on(node, snapshot(session).replicas):
        stuck = {app for app, _ in homeless}
        waited_for = [status for status in left if status.app not in stuck]
        text = ", ".join(f"{status.replica} {status.state.value}" for status in left)
        if text != said:
            progress(f"{name}: {text}")
            said = text
        if not waited_for:
            return tuple(status.replica for status in left)
        time.sleep(POLL_S)
    return ()


def _node(session: Session, name: str) -> NodeInventory:
    nodes = session.inventory().nodes
    for node in nodes:
        if node.node == name and node.alive:
            return node
    known = ", ".join(node.node for node in nodes if node.alive) or "none"
    raise NodeUnknown(f"no living node is named {name!r}; there are: {known}", next=("hetero-llm node list",))


def _homeless(session: Session, leaving: NodeInventory) -> list[tuple[str, int]]:
    """Return application and number of the replicas on `leaving` that fit on no other node."""
    replicas = snapshot(session).replicas
    models = msgspec.json.decode(session.ask("models"), type=tuple[ConfiguredModel, ...])
    nodes = with_holders(session.inventory().nodes, replicas)
    without = tuple(replace(node, alive=node.alive and node.node != leaving.node) for node in nodes)
    affected = {status.app for status in _on(leaving, replicas)}
    lacking = [places_lacking(pools_now(model, replicas, without), without) for model in models]
    return [(app, count) for found in lacking for app, count in found.items() if app in affected]


def _on(node: NodeInventory, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    return [status for status in replicas if status.node == node.node and status.state in _HERE]
