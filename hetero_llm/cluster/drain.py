"""Empty a node without losing a request: Ray places nothing new there, and its replicas get successors elsewhere.

Serve moves a replica to an equal device; where none is free, the reconciler starts its successor on another accelerator
that was allowed. Either way the successor is ready before the replica leaves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from hetero_llm.cluster.deploy import snapshot
from hetero_llm.cluster.nodes import note_drained, with_holders
from hetero_llm.cluster.pools import ConfiguredModel, closed, pools_now
from hetero_llm.cluster.ray_private import drain_node, draining_nodes, head_id
from hetero_llm.cluster.session import Session
from hetero_llm.errors import DrainImpossible, NodeUnknown
from hetero_llm.matrix import load_matrix
from hetero_llm.model import NodeInventory, ReplicaState, ReplicaStatus
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.reconcile import Situation, places_lacking, stranded
from hetero_llm.scheduler.rules import rules_of

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
    stuck = _stranded(session, node)
    if stuck and not force:
        raise DrainImpossible(
            f"{name} cannot be drained: "
            + "; ".join(f"{count} of {app} has no other place" for app, count in stuck.items()),
            next=("hetero-llm stop MODEL", "hetero-llm devices", f"hetero-llm drain {name} --force"),
        )
    assert node.ray_node_id is not None
    note_drained(node.ray_node_id)
    drain_node(node.ray_node_id, "hetero-llm drain")
    said = None
    while left := _on(node, snapshot(session).replicas):
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


def _stranded(session: Session, leaving: NodeInventory) -> dict[str, int]:
    """Return application to the number of its replicas on `leaving` that fit nowhere else, on whatever was allowed."""
    replicas = snapshot(session).replicas
    models = msgspec.json.decode(session.ask("models"), type=tuple[ConfiguredModel, ...])
    known, told = session.inventory().nodes, draining_nodes()
    names = {leaving.node, *(node.node for node in known if node.ray_node_id in told)}
    nodes = with_holders(closed(known, names), replicas)
    pools = {model.entry.name: pools_now(model, replicas, nodes, names) for model in models}
    rules = {backend.kind: rules_of(backend) for backend in load_plugins().backends()}
    found: dict[str, int] = {}
    for model in models:
        own = pools[model.entry.name]
        others = [pool for name, some in pools.items() if name != model.entry.name for pool in some]
        if model.deployment is None:
            found |= places_lacking(own, nodes)
        else:
            found |= stranded(
                Situation(
                    facts=model.deployment.plan.model,
                    wishes=model.deployment.wishes,
                    pools=own,
                    nodes=nodes,
                    rules=rules,
                    matrix=load_matrix(),
                    others=others,
                )
            )
    affected = {status.app for status in _on(leaving, replicas)}
    return {app: count for app, count in found.items() if app in affected}


def _on(node: NodeInventory, replicas: Sequence[ReplicaStatus]) -> list[ReplicaStatus]:
    return [status for status in replicas if status.node == node.node and status.state in _HERE]
