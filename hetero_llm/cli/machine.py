"""The nodes a verb plans on: a running cluster's, or this machine's with the devices that are taken marked so."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hetero_llm.cli import render
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
    """Return whether a running cluster is named, or this machine takes part in one."""
    from hetero_llm.cluster.state import running_clusters

    return bool(address or os.environ.get("RAY_ADDRESS") or running_clusters())


def cluster_to_join() -> str | None:
    """Return the cluster that `serve` joins without being told: ``RAY_ADDRESS``, else that of a lab or node here.

    None when there is none, so that a new one is started.

    Raises:
        NotRunning: there are several.
    """
    from hetero_llm.cluster.address import where
    from hetero_llm.cluster.state import all_live_records

    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    addresses = {record.address for record in all_live_records() if record.role != "serve" and record.address}
    if len(addresses) > 1:
        return where(None).address
    return next(iter(addresses), None)


def gateway_of(address: str | None) -> str | None:
    """Return the URL of the gateway that a `serve` of this machine gave the cluster at `address`, None if none."""
    from hetero_llm.cluster.state import live_records

    records = live_records() if address else ()
    return next((record.url for record in records if record.url and record.address == address), None)


def devices_text(node: NodeInventory) -> str:
    """Return ``2 x cuda H100-80GB (simulated)``; with several types, one after the other."""
    counts = Counter((device.accelerator, device.simulated) for device in node.devices)
    return ", ".join(render.marked(f"{n} x {node.kind} {name}", simulated) for (name, simulated), n in counts.items())


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
