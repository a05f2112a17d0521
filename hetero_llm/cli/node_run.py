"""`node start` and `node join` while they run: what this machine gives, the token, the ready lines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero_llm.cli import render
from hetero_llm.cli.keeping import keep_up
from hetero_llm.cli.machine import devices_text
from hetero_llm.cli.signals import StopSignals
from hetero_llm.cluster import state
from hetero_llm.cluster.address import check_token, make_token, use_token, where
from hetero_llm.cluster.health import HealthWatch, watch_nodes
from hetero_llm.cluster.node_agent import NodeAgent, NodeStart, check_form, check_joinable, node_start
from hetero_llm.cluster.session import attach, detach
from hetero_llm.errors import ClusterUnreachable, NodeLost, UnknownKind, UsageError
from hetero_llm.inventory.node import local_address, local_inventories
from hetero_llm.inventory.override import node_name
from hetero_llm.model import NodeInventory
from hetero_llm.plugin import Backend
from hetero_llm.plugin.manager import PluginManager, load_plugins

NAME_MAX = 100
"""Letters of a node's name in the name of its record, which is a file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What both verbs were given.

    Attributes:
        kinds: only these; empty for all.
        ip: address other nodes reach this one at, None to find out.
        labels: labels models can ask for.
    """

    kinds: tuple[str, ...]
    ip: str | None
    labels: Mapping[str, str]
    token_file: Path | None


def run_head(port: int, given: Given) -> int:
    """Start a cluster and keep it up until a signal comes.

    Raises:
        ClusterStartFailed, NodeLost, AlreadyRunning: as `keep_up`.
    """
    token = given.token_file or _token_of_environment() or _own_token()
    if token is not None:
        check_token(token)
        use_token(token)
    nodes = _nodes(given, given.ip or local_address())
    agent = NodeAgent()

    def start() -> None:
        head, *others = nodes
        agent.start_head(head, port)
        agent.join(agent.address, others)
        agent.register()
        _tell_joined(nodes)
        render.say(f"cluster: {agent.address}")
        note = f"   # a copy of {token}" if token else ""
        render.say(f"other machines: hetero-llm node join {agent.address} --token-file FILE{note}")

    return _run(_KeptNodes(agent, nodes, start, withdraws=False), token)


def run_join(address: str, given: Given) -> int:
    """Join the cluster at `address` and stay until a signal comes.

    Raises:
        ClusterUnreachable, VersionMismatch: as `check_joinable`.
        ClusterStartFailed, NodeLost, NodeNameTaken, AlreadyRunning: as `keep_up`.
    """
    check_form(address)
    token = given.token_file or _token_of_environment() or _token_of(address)
    if token is not None:
        check_token(token)
        use_token(token)
    check_joinable(address)
    nodes = _nodes(given, given.ip or local_address(address.rpartition(":")[0].strip("[]")))
    if nodes[0].inventory is None:
        raise UsageError("this machine has no device to give", next=("hetero-llm devices", "hetero-llm doctor"))
    agent = NodeAgent()

    def start() -> None:
        agent.join(address, nodes)
        agent.register()
        _tell_joined(nodes)

    return _run(_KeptNodes(agent, nodes, start, withdraws=True), token)


def run_adopt(address: str | None) -> None:
    """Register the plain Ray nodes of this machine with the cluster at `address`, by default the one that is known.

    Raises:
        NotRunning, ClusterUnreachable: as `hetero_llm.cluster.session.attach`.
        NodeUnknown, NodeNameTaken: as `hetero_llm.cluster.adopt.adopt_nodes`.
    """
    from hetero_llm.cluster.adopt import adopt_nodes

    manager = load_plugins()
    place = where(address)
    if place.token:
        use_token(place.token)
    here = local_inventories(manager)
    attach(place.address)
    try:
        native = {backend.kind: backend.native_resource for backend in manager.backends()}
        for node in adopt_nodes(here, native):
            render.say(f"node {node.node} joined: {devices_text(node)}")
    finally:
        detach()


def one_node(manager: PluginManager, kind: str | None) -> NodeInventory:
    """Return what this machine has of `kind`, or of its only kind.

    Raises:
        UnknownKind: it has no device of that kind.
        UsageError: it has several kinds and none is named.
    """
    nodes = [node for node in local_inventories(manager, kinds=(kind,) if kind else ()) if node.devices]
    if not nodes:
        raise UnknownKind(f"this machine has no {kind or 'accelerator'} device", next=("hetero-llm devices",))
    if len(nodes) > 1:
        choices = tuple(f"hetero-llm node env --kind {node.kind}" for node in nodes)
        raise UsageError("this machine has several kinds; one Ray node carries one", next=choices)
    return nodes[0]


class _KeptNodes:
    """This machine's nodes as something to keep up."""

    def __init__(self, agent: NodeAgent, nodes: Sequence[NodeStart], start: Callable[[], None], *, withdraws: bool):
        self.agent = agent
        self._nodes = nodes
        self._start = start
        self._withdraws = withdraws
        self._health: HealthWatch | None = None
        self._told: set[str] = set()

    def start(self) -> Mapping[str, Any]:
        self._start()
        self._health = watch_nodes(self.agent.registered, self.agent.address, render.say)
        return {"address": self.agent.address, "nodes": tuple(node.name for node in self._nodes)}

    def check(self) -> bool:
        drained = self.agent.drained()
        lost = [name for name in self.agent.lost() if name not in drained]
        if lost:
            raise NodeLost(
                f"node {', '.join(lost)} ended by itself",
                cause=f"Ray's processes failed, or the cluster at {self.agent.address} is gone",
                next=("hetero-llm node start --head", f"hetero-llm node join {self.agent.address}"),
            )
        for name in drained - self._told:
            render.say(f"node {name} was drained and has left")
        self._told |= drained
        return len(drained) < len(self._nodes)

    def end(self) -> None:
        if self._health is not None:
            self._health.stop()
        try:
            if self._withdraws:
                self.agent.withdraw()
        except ClusterUnreachable as error:
            render.say(f"the cluster is not told: {error}")
        finally:
            self.agent.leave()


def _run(kept: _KeptNodes, token: Path | None) -> int:
    name = "node-" + re.sub(r"[^A-Za-z0-9._-]+", "-", node_name())[:NAME_MAX]
    record = state.new_record(name, started_unix_s=time.time(), role="node")
    record = replace(record, temp_dir=kept.agent.root, token=str(token) if token else None)
    with StopSignals() as signals:
        return keep_up(kept, record, signals)


def _tell_joined(nodes: Sequence[NodeStart]) -> None:
    for node in nodes:
        what = devices_text(node.inventory) if node.inventory is not None else ""
        render.say(f"node {node.name} joined: {what or 'no devices'}")


def _nodes(given: Given, ip: str) -> tuple[NodeStart, ...]:
    """Return this machine's nodes, one per kind with devices; one without, when it has none."""
    manager = load_plugins()
    backends = {backend.kind: backend for backend in manager.backends()}
    found = [node for node in local_inventories(manager, kinds=given.kinds) if node.devices]
    missing = set(given.kinds) - {node.kind for node in found}
    if missing:
        raise UnknownKind(f"this machine has no {', '.join(sorted(missing))} device", next=("hetero-llm devices",))
    if not found:
        return (_node(node_name(), ip, None, None),)
    return tuple(_node(node.node, ip, replace(node, labels=given.labels), backends.get(node.kind)) for node in found)


def _node(name: str, ip: str, inventory: NodeInventory | None, backend: Backend | None) -> NodeStart:
    host = inventory.host if inventory is not None else node_name()
    return node_start(name, host, ip, inventory, backend, os.environ)


def _token_of_environment() -> Path | None:
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(path) if path else None


def _own_token() -> Path | None:
    """Return this machine's own token, made at the first use; None where Ray gets it by value, or none is wanted."""
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ["RAY_AUTH_MODE"] != "token":
        return None
    path = state.state_dir() / "token"
    if not path.exists() or not path.stat().st_size:
        make_token(path)
    return path


def _token_of(address: str) -> Path | None:
    """Return the token of a cluster this machine takes part in already.

    Raises:
        UsageError: it takes part in none there, and Ray would be refused without one.
    """
    record = state.running_clusters().get(address)
    known = state.token_path(record) if record is not None else None
    if known is not None:
        return Path(known)
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ["RAY_AUTH_MODE"] != "token":
        return None
    raise UsageError(
        f"the token of the cluster at {address} is needed",
        next=(
            f"hetero-llm node join {address} --token-file FILE   # a copy of the head's; the head names its file",
            "RAY_AUTH_MODE=disabled   # for a cluster without tokens",
        ),
    )
