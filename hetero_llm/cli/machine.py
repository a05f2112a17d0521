"""The nodes a verb plans on: a running cluster's, or this machine's with the devices that are taken marked so."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_llm.model import NodeInventory

if TYPE_CHECKING:
    from hetero_llm.plugin.manager import PluginManager


def local_nodes(manager: PluginManager) -> tuple[NodeInventory, ...]:
    """Discover this machine's devices; those another `serve` holds by lease are marked. Needs no Ray."""
    from hetero_llm.cluster.lease import holders
    from hetero_llm.inventory.node import local_inventories

    nodes = local_inventories(manager)
    held = holders(device.uid for node in nodes for device in node.devices if not device.simulated)
    return tuple(
        replace(node, devices=tuple(replace(item, held_by=held.get(item.uid, item.held_by)) for item in node.devices))
        for node in nodes
    )


def cluster_is_known(address: str | None) -> bool:
    """Return whether a running cluster is named or was started on this machine."""
    from hetero_llm.cluster.state import live_records

    return bool(address or os.environ.get("RAY_ADDRESS") or any(record.address for record in live_records()))


def cluster_nodes(address: str | None) -> tuple[NodeInventory, ...]:
    """Return the nodes of the running cluster, with holders.

    Raises:
        NotRunning, ClusterUnreachable: as `hetero_llm.cluster.session.connect`.
    """
    from hetero_llm.cluster.session import connect

    session = connect(address)
    try:
        return session.inventory().nodes
    finally:
        session.close()
