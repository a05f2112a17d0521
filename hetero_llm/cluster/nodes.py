"""The nodes of a cluster. Each publishes what it has in the cluster's key-value store; who is alive, Ray says.

The store outlives every actor, so a node need not be told of a scheduler that was started again, nor the other way
round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import msgspec
import ray

from hetero_llm.cluster.ray_private import kv_delete, kv_get, kv_get_at, kv_list, kv_put, kv_put_at
from hetero_llm.errors import ClusterUnreachable, NodeNameTaken, NodeUnknown
from hetero_llm.model import Inventory, NodeInventory, ReplicaState, ReplicaStatus

_NAMESPACE = "hetero-llm-nodes"
"""The key is the node's name: one that comes back under its name replaces what it was before."""

_DRAINED = "hetero-llm-drained"
"""The key is Ray's id of the node."""


def publish_node(node: NodeInventory) -> None:
    """Make a node and its devices known, or known anew. The caller is connected to the cluster.

    Raises:
        NodeNameTaken: another living node has this name.
    """
    known = kv_get(_NAMESPACE, node.node)
    if known is not None:
        other = msgspec.json.decode(known, type=NodeInventory).ray_node_id
        if other != node.ray_node_id and other in _alive_ids():
            raise NodeNameTaken(
                f"a living node of this cluster is named {node.node!r} already",
                next=("hetero-llm node list", "give this one another name: HETERO_LLM_NODE_NAME=NAME"),
            )
    kv_put(_NAMESPACE, node.node, msgspec.json.encode(node))


def republish_node(address: str, node: NodeInventory) -> None:
    """Make what changed about a published node known to the cluster at `address`; no connection is needed or kept.

    Raises:
        ClusterUnreachable: it does not answer.
    """
    try:
        kv_put_at(address, _NAMESPACE, node.node, msgspec.json.encode(node))
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise ClusterUnreachable(f"the cluster at {address} does not answer", cause=str(error)) from error


def note_drained(ray_node_id: str) -> None:
    """Write down that a node was told to leave: whoever keeps it then knows why its Ray processes end."""
    kv_put(_DRAINED, ray_node_id, b"1")


def was_drained(address: str, ray_node_id: str) -> bool:
    """Return whether a node of the cluster at `address` was told to leave; False when the cluster does not answer."""
    try:
        return kv_get_at(address, _DRAINED, ray_node_id) is not None
    except (ray.exceptions.RayError, ConnectionError):
        return False


def withdraw_node(name: str) -> None:
    """Forget a node that left on purpose; nothing happens when it is not known."""
    kv_delete(_NAMESPACE, name)


def published_nodes() -> Inventory:
    """Return all nodes that were published, by name; `alive` is Ray's word of this moment."""
    alive = _alive_ids()
    contents = (kv_get(_NAMESPACE, name) for name in sorted(kv_list(_NAMESPACE)))
    nodes = (msgspec.json.decode(content, type=NodeInventory) for content in contents if content is not None)
    return Inventory(nodes=tuple(replace(node, alive=node.ray_node_id in alive) for node in nodes))


def with_holders(nodes: Iterable[NodeInventory], replicas: Iterable[ReplicaStatus]) -> tuple[NodeInventory, ...]:
    """Return `nodes` with the replica that holds each device, as the replicas themselves say."""
    ended = (ReplicaState.FAILED, ReplicaState.STOPPED)
    held = {uid: status.replica for status in replicas if status.state not in ended for uid in status.devices}
    return tuple(
        replace(node, devices=tuple(replace(d, held_by=held.get(d.uid, d.held_by)) for d in node.devices))
        for node in nodes
    )


def node_here() -> NodeInventory:
    """Return the node the calling actor runs on.

    Raises:
        NodeUnknown: nobody published it.
    """
    ray_node_id = ray.get_runtime_context().get_node_id()
    for node in published_nodes().nodes:
        if node.ray_node_id == ray_node_id:
            return node
    raise NodeUnknown(
        f"the Ray node {ray_node_id} was not registered with hetero-llm: its devices are not known",
        next=("hetero-llm node list",),
    )


def _alive_ids() -> frozenset[str]:
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])
