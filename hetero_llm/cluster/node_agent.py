"""The nodes one command keeps in a cluster: started, registered, watched, taken out again.

`node start`, `node join` and `lab up` are this, with nodes from different places.
"""

from __future__ import annotations

import os
import platform
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetero_llm.cluster import state
from hetero_llm.cluster.address import check_reachable, check_welcome, has_port
from hetero_llm.cluster.raylet import Raylet, RayletSpec, Started, end_all
from hetero_llm.cluster.session import attach, detach, end_leftovers
from hetero_llm.errors import ClusterStartFailed, ClusterUnreachable, NodeNameTaken, VersionMismatch
from hetero_llm.model import NodeInventory
from hetero_llm.plugin import Backend
from hetero_llm.scheduler.resources import (
    LABEL_PREFIX,
    explicit_resources,
    label_value,
    node_labels,
    raylet_environ,
)

VERSION_DEADLINE_S = 10.0
"""Time a cluster gets to say which versions it runs."""

NAME_DEADLINE_S = 15.0
"""Ray takes 5 to 10 s to notice that a node is gone."""

NAME_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """One node to be.

    Attributes:
        name: unique in the cluster.
        host: label of the box.
        ip: address other nodes reach it at.
        inventory: what it has; None for a head without devices.
        native_resource: Ray resource that hands out the device ids; None where devices are leased.
        environ: environment of the node and of everything that runs on it.
    """

    name: str
    host: str
    ip: str
    inventory: NodeInventory | None
    native_resource: str | None
    environ: Mapping[str, str]

    def spec(self, folder: Path, address: str | None, port: int) -> RayletSpec:
        """Return what its process is told."""
        have = (self.inventory,) if self.inventory is not None else ()
        native = {node.kind: self.native_resource for node in have}
        labels = {LABEL_PREFIX + "host": label_value(self.host)}
        for node in have:
            labels |= node_labels(replace(node, host=self.host)) | dict(node.labels)
        return RayletSpec(
            name=self.name,
            address=address,
            port=port,
            ip=self.ip,
            folder=str(folder),
            resources=explicit_resources(have, native),
            labels=labels,
        )


def node_start(
    name: str,
    host: str,
    ip: str,
    inventory: NodeInventory | None,
    backend: Backend | None,
    environ: Mapping[str, str],
) -> NodeStart:
    """Return how to start a node; `backend` is that of its kind, None for a kind without a plugin, or no kind.

    The variables the raylet takes device ids from are added to `environ`.
    """
    native = backend.native_resource if backend is not None else None
    ids = raylet_environ(inventory, backend) if inventory is not None and backend is not None else {}
    return NodeStart(
        name=name, host=host, ip=ip, inventory=inventory, native_resource=native, environ={**environ, **ids}
    )


class NodeAgent:
    """Some nodes of one cluster, all on this machine. `leave` in every case, also after a start that failed.

    Attributes:
        root: folder of the nodes' files, made here and removed by `leave`.
        address: ``host:port`` of the cluster, empty before it is known.
        registered: the nodes with devices, as they were published.
    """

    def __init__(self) -> None:
        """Make the folder; nothing is started."""
        self.root = tempfile.mkdtemp(prefix=state.RAY_DIR_PREFIX)
        self.address = ""
        self._nodes: list[NodeStart] = []
        self._raylets: list[Raylet] = []
        self.registered: tuple[NodeInventory, ...] = ()

    def start_head(self, node: NodeStart, port: int) -> None:
        """Start a new cluster with `node` as its head, at `port` or, with 0, at any free one.

        Raises:
            ClusterStartFailed: it did not come up, or the port belongs to another process.
        """
        _check_port(node.ip, port)
        self._start(node, None, port)
        self.address = self._raylets[0].wait_started().address

    def join(self, address: str, nodes: Sequence[NodeStart]) -> None:
        """Start `nodes`, all at the same time, as members of the cluster at `address`.

        Raises:
            ClusterStartFailed: one did not come up, or its address is none of this machine's.
        """
        self.address = address
        for ip in dict.fromkeys(node.ip for node in nodes):
            _check_ip(ip)
        for node in nodes:
            self._start(node, address, 0)

    def register(self, name_deadline_s: float = NAME_DEADLINE_S) -> None:
        """Wait until all nodes are up and publish what they have; start the scheduler if the cluster has none.

        Args:
            name_deadline_s: how long to wait for a name to become free. A node that comes back right after it died is
                sooner here than the cluster knows of its death.

        Raises:
            ClusterStartFailed: a node did not come up.
            NodeNameTaken: another living node has such a name.
        """
        started = [raylet.wait_started() for raylet in self._raylets]
        attach(self.address)
        try:
            from hetero_llm.cluster.controller import start_scheduler

            start_scheduler()
            give_up = time.monotonic() + name_deadline_s
            for inventory in _placed(self._nodes, started):
                _publish(inventory, give_up)
                self.registered += (inventory,)
        finally:
            # Nothing of the cluster depends on this process, and Ray ends a driver whose node it loses.
            detach()

    def pids(self) -> dict[str, int]:
        """Return node name → id of its process."""
        return {raylet.name: raylet.pid for raylet in self._raylets}

    def lost(self) -> tuple[str, ...]:
        """Return the names of the nodes that ended by themselves."""
        return tuple(raylet.name for raylet in self._raylets if raylet.exit_code() is not None)

    def drained(self) -> set[str]:
        """Return the names of those that ended because they were told to: Ray ends a drained node that has no work."""
        ended = set(self.lost())
        if not ended:
            return set()
        from hetero_llm.cluster.nodes import was_drained

        nodes = [node for node in self.registered if node.node in ended and node.ray_node_id is not None]
        return {node.node for node in nodes if was_drained(self.address, str(node.ray_node_id))}

    def withdraw(self) -> None:
        """Make the cluster forget the nodes. Without it they stay listed as nodes that are down.

        Raises:
            ClusterUnreachable: it does not answer.
        """
        nodes, self.registered = self.registered, ()
        if not nodes:
            return
        attach(self.address)
        try:
            from hetero_llm.cluster.nodes import withdraw_node

            for node in nodes:
                withdraw_node(node.node)
        finally:
            detach()

    def leave(self) -> None:
        """End the nodes, the head last, and remove every file. Safe to call twice."""
        raylets, self._raylets = self._raylets, []
        end_all(raylets[1:])
        end_all(raylets[:1])
        # Also when the nodes' files are gone: a node that fell apart leaves Ray's agents, and its engines' leases.
        end_leftovers(self.root)

    def _start(self, node: NodeStart, address: str | None, port: int) -> None:
        # A number and not the name: paths of Unix sockets are limited to 107 bytes.
        folder = Path(self.root) / f"n{len(self._raylets)}"
        self._raylets.append(Raylet(node.spec(folder, address, port), node.environ))
        self._nodes.append(node)


def _publish(inventory: NodeInventory, give_up: float) -> None:
    from hetero_llm.cluster.nodes import publish_node

    while True:
        try:
            return publish_node(inventory)
        except NodeNameTaken:
            if time.monotonic() > give_up:
                raise
            time.sleep(NAME_POLL_S)


def _check_port(ip: str, port: int) -> None:
    """Find out early what Ray finds out after 30 s and tells only its log."""
    _check_ip(ip)
    try:
        _try_bind(ip, port)
    except OSError as error:
        raise ClusterStartFailed(
            f"the cluster cannot listen at {ip}:{port}",
            cause=error.strerror or str(error),
            next=("hetero-llm node start --head --port 0   # any free one",),
        ) from error


def _check_ip(ip: str) -> None:
    try:
        _try_bind(ip, 0)
    except OSError as error:
        raise ClusterStartFailed(
            f"{ip} is no address of this machine",
            cause=error.strerror or str(error),
            next=("--address-of-this-node IP, one of those `hostname -I` prints",),
        ) from error


def _try_bind(ip: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((ip, port))


def _placed(nodes: Sequence[NodeStart], started: Sequence[Started]) -> list[NodeInventory]:
    return [
        replace(node.inventory, node=node.name, host=node.host, address=node.ip, ray_node_id=where.ray_node_id)
        for node, where in zip(nodes, started, strict=True)
        if node.inventory is not None
    ]


def check_form(address: str) -> None:
    """Raise ClusterUnreachable when `address` is not ``HOST:PORT``."""
    if not has_port(address):
        raise ClusterUnreachable(f"{address!r} is not HOST:PORT", next=("hetero-llm node join HOST:6379",))


def check_joinable(address: str) -> None:
    """Find out early why a node could not join the cluster at `address`; uses the token chosen by `use_token`.

    Raises:
        ClusterUnreachable: nothing answers there, or the token is refused.
        VersionMismatch: the cluster runs another Ray or Python.
    """
    check_form(address)
    check_reachable(address)
    from hetero_llm.cluster.ray_private import cluster_versions, reread_authentication

    reread_authentication()
    try:
        check_welcome(address)
        theirs = cluster_versions(address, VERSION_DEADLINE_S)
    except Exception as error:
        raise ClusterUnreachable(
            f"the cluster at {address} does not let this node in",
            cause=str(error),
            next=(
                f"hetero-llm node join {address} --token-file FILE   # a copy of the head's token",
                "check HOST:PORT: the head says it when it starts, and `hetero-llm node list -o json` there",
            ),
        ) from error
    if theirs is not None:
        compare_versions(address, theirs)


def compare_versions(address: str, theirs: tuple[str, str]) -> None:
    """Raise VersionMismatch unless this process may join a cluster of versions `theirs`, Ray's and Python's."""
    import ray

    ours = (ray.__version__, platform.python_version())
    depth = 2 if os.environ.get("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL") == "minor" else 3
    python = [version.split(".")[:depth] for version in (theirs[1], ours[1])]
    if theirs[0] == ours[0] and python[0] == python[1]:
        return
    steps = [f"pip install 'ray[default,serve]=={theirs[0]}'"] if theirs[0] != ours[0] else []
    if python[0] != python[1]:
        steps += [f"use Python {theirs[1]} on this node"]
        if python[0][:2] == python[1][:2]:
            steps += ["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor on all nodes, to let another patch release in"]
    raise VersionMismatch(
        f"the cluster at {address} runs Ray {theirs[0]} on Python {theirs[1]}, this node Ray {ours[0]} on {ours[1]}",
        next=tuple(steps),
    )
