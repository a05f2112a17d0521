"""Ray nodes that hetero-llm did not start and knows nothing of: who they are, and how to make them known."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hetero_llm.scheduler.resources import LABEL_PREFIX, NATIVE_RESOURCES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainNode:
    """A living Ray node that nobody registered.

    Attributes:
        address: its IP address.
        hostname: as Ray reports it.
        resources: native accelerators and counters of ours, by Ray's names.
        labels: those of ours.
        user_labels: those that are neither Ray's nor ours.
    """

    ray_node_id: str
    address: str
    hostname: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]
    user_labels: Mapping[str, str]


def plain_nodes(registered: Collection[str]) -> tuple[PlainNode, ...]:
    """Return the living Ray nodes whose ids are not `registered`. The caller is connected to the cluster.

    A head that was started without devices has nothing to register and is left out.
    """
    import ray

    found = (_plain(node) for node in ray.nodes() if node["Alive"] and node["NodeID"] not in registered)
    return tuple(node for node in found if not _is_ours_without_devices(node))


def _plain(node: Mapping[str, object]) -> PlainNode:
    resources, labels = node["Resources"], node["Labels"]
    assert isinstance(resources, dict)
    assert isinstance(labels, dict)
    return PlainNode(
        ray_node_id=str(node["NodeID"]),
        address=str(node["NodeManagerAddress"]),
        hostname=str(node["NodeManagerHostname"]),
        resources={name: n for name, n in resources.items() if name in NATIVE_RESOURCES or name.startswith("hetero_")},
        labels={name: text for name, text in labels.items() if name.startswith(LABEL_PREFIX)},
        user_labels={name: text for name, text in labels.items() if not name.startswith((LABEL_PREFIX, "ray.io/"))},
    )


def _is_ours_without_devices(node: PlainNode) -> bool:
    return LABEL_PREFIX + "host" in node.labels and LABEL_PREFIX + "kind" not in node.labels
