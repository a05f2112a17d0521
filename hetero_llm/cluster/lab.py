"""A cluster of several nodes on this machine, as a file says: for demonstrations, tests, and learning."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hetero_llm.cluster.address import make_token, use_token
from hetero_llm.cluster.lab_file import LabNode
from hetero_llm.cluster.node_agent import NodeAgent, node_start
from hetero_llm.cluster.session import LOOPBACK
from hetero_llm.errors import ClusterStartFailed, NodeLost
from hetero_llm.inventory.node import discover_kinds
from hetero_llm.inventory.probe import Probe
from hetero_llm.model import NodeInventory
from hetero_llm.plugin.manager import PluginManager


class Lab:
    """The running cluster. `end` in every case, also after a start that failed.

    Attributes:
        agent: the nodes' processes.
        nodes: what each node has, in the order of the file.
    """

    def __init__(self) -> None:
        """Nothing is started."""
        self.agent = NodeAgent()
        self.nodes: tuple[NodeInventory, ...] = ()
        self._gone: set[str] = set()

    @property
    def token(self) -> str:
        """File with the cluster's token."""
        return str(Path(self.agent.root) / "token")

    def start(self, wanted: Sequence[LabNode], manager: PluginManager) -> None:
        """Start all nodes; the first is the head.

        Raises:
            ClusterStartFailed: a node has no device, or did not come up.
            OverrideInvalid: `devices` of a node cannot be read.
        """
        make_token(Path(self.token))
        use_token(self.token)
        self.nodes = _discover(wanted)
        backends = {backend.kind: backend for backend in manager.backends()}
        head, *others = [
            node_start(node.node, node.host, LOOPBACK, node, backends.get(node.kind), lab.environ(os.environ))
            for lab, node in zip(wanted, self.nodes, strict=True)
        ]
        self.agent.start_head(head, 0)
        self.agent.join(self.agent.address, others)
        self.agent.register()

    def check(self, tell: Callable[[str], None]) -> None:
        """Tell of nodes that ended since the last call.

        Raises:
            NodeLost: the head is among them, and with it the cluster is gone.
        """
        for name in self.agent.lost():
            if name == self.nodes[0].node:
                raise NodeLost(
                    f"node {name} ended by itself; it was the head",
                    cause="Ray's processes failed, or were killed",
                    next=("hetero-llm lab up FILE", "hetero-llm doctor"),
                )
            if name not in self._gone:
                self._gone.add(name)
                tell(f"node {name} ended by itself")

    def end(self) -> None:
        """End everything and remove every file. Safe to call twice."""
        self.agent.leave()


def _discover(wanted: Sequence[LabNode]) -> tuple[NodeInventory, ...]:
    with ThreadPoolExecutor(len(wanted)) as pool:
        found = pool.map(lambda node: discover_kinds((node.kind,), node.environ(os.environ))[node.kind], wanted)
        return tuple(_inventory(node, probe) for node, probe in zip(wanted, found, strict=True))


def _inventory(node: LabNode, probe: Probe) -> NodeInventory:
    found = probe.discovery
    if not found.devices:
        raise ClusterStartFailed(
            f"node {node.name} has no {node.kind} device",
            cause="; ".join(problem.text for problem in found.problems) or None,
            next=(
                f"give it some: devices: 'count=1,type=…' or leave {node.name} out",
                f"hetero-llm doctor {node.kind}",
            ),
        )
    return NodeInventory(
        node=node.name,
        host=node.host or node.name,
        address=LOOPBACK,
        kind=node.kind,
        versions=probe.versions,
        devices=found.devices,
        problems=found.problems,
        labels=node.labels,
    )
