"""Have every node of a running cluster examine itself, and gather what it says of itself and what Ray says of it.

The examination is the command `hetero-llm doctor` on the node, in the environment of its raylet, which is the one its
replicas get. Values cross as builtins: no class of ours is unpickled.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hetero_llm.cluster.session import Session
from hetero_llm.inventory.asking import ask
from hetero_llm.model import NodeInventory
from hetero_llm.plugin import Check

DEADLINE_S = 60.0
"""For all nodes together: they work at the same time. Discovery alone may take ten seconds on a sick driver."""

_START_S = 15.0
"""For Ray to start a worker on each node."""

_CLOCK_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswer:
    """What is known of one Ray node.

    Attributes:
        node: its name; Ray's name of the host when nobody registered it.
        inventory: what it published, None when it was started by other means.
        resources: all resources Ray holds for it, taken ones included.
        ray_version, python_version: of the interpreter its actors run in; None when it did not answer.
        clock_offset_s: its wall clock minus ours; None when not measured.
        clock_error_s: by how much that may be wrong: half of the round trip.
        checks: results of its own `doctor`; empty when it did not answer.
        error: why there is no answer, in one line.
    """

    node: str
    inventory: NodeInventory | None
    resources: Mapping[str, float]
    ray_version: str | None = None
    python_version: str | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None
    checks: tuple[Check, ...] = ()
    error: str | None = None


def examine_nodes(session: Session, only: str | None = None, deadline_s: float = DEADLINE_S) -> tuple[NodeAnswer, ...]:
    """Ask all nodes, or the one named `only`, at the same time; by name. One that does not answer has an `error`.

    A node that was published and is no more in Ray's list is in the answer too. Empty when no node has that name.
    """
    published = {node.ray_node_id: node for node in session.inventory().nodes}
    known = {info["NodeID"]: info for info in ray.nodes()}
    alive = {node_id: info for node_id, info in known.items() if info["Alive"]}
    names = {node_id: node.node for node_id, node in published.items() if node_id is not None}
    names = {node_id: info["NodeManagerHostname"] for node_id, info in alive.items()} | names
    wanted = [node_id for node_id, name in names.items() if only in (None, name)]
    reports = _reports([node_id for node_id in wanted if node_id in alive], deadline_s)
    answers = [
        _answer(names[node_id], published.get(node_id), known.get(node_id, {}), reports.get(node_id))
        for node_id in wanted
    ]
    return tuple(sorted(answers, key=lambda answer: answer.node))


def _answer(
    name: str, inventory: NodeInventory | None, info: Mapping[str, Any], report: Mapping[str, Any] | None
) -> NodeAnswer:
    resources: Mapping[str, float] = info.get("Resources", {})
    if report is None:
        return NodeAnswer(node=name, inventory=inventory, resources=resources, error="Ray says this node is down")
    checks = msgspec.convert(report.get("checks", ()), tuple[Check, ...])
    said = {key: value for key, value in report.items() if key != "checks"}
    return NodeAnswer(node=name, inventory=inventory, resources=resources, checks=checks, **said)


def _reports(node_ids: Sequence[str], deadline_s: float) -> dict[str, dict[str, Any]]:
    asked = {node_id: _on(node_id, _examine).remote(deadline_s) for node_id in node_ids}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=deadline_s + _START_S)
    return {node_id: _report(node_id, answer, deadline_s) for node_id, answer in asked.items()}


def _report(node_id: str, answer: Any, deadline_s: float) -> dict[str, Any]:
    try:
        report: dict[str, Any] = ray.get(answer, timeout=0.1)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(answer)  # by force it could not end the processes it started
        return {"error": f"no answer within {deadline_s:g} s"}
    except ray.exceptions.RayError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"error": f"the examination could not be run: {lines[-1].strip()}"}
    return report | _clock(node_id)


def _clock(node_id: str) -> dict[str, float]:
    before = time.time()
    try:
        there: float = ray.get(_on(node_id, _now).remote(), timeout=_CLOCK_DEADLINE_S)
    except ray.exceptions.RayError:
        return {}  # it answered a moment ago; that no clock was measured is shown as such
    after = time.time()
    return {"clock_offset_s": there - (before + after) / 2, "clock_error_s": (after - before) / 2}


def _on(node_id: str, function: Any) -> Any:
    """Return `function` as a Ray task for one node that takes nothing there, and so runs on a full node too."""
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)


def _now() -> float:
    return time.time()


def _examine(deadline_s: float) -> dict[str, Any]:
    """Run `doctor` here; what a node does when it is asked."""
    report: dict[str, Any] = {"ray_version": ray.__version__, "python_version": platform.python_version()}
    argv = [sys.executable, "-m", "hetero_llm.cli", "doctor", "-o", "json"]
    said = ask({"doctor": argv}, deadline_s)["doctor"]
    if said.status is None:
        return report | {"error": f"`hetero-llm doctor` did not end there within {deadline_s:g} s"}
    try:
        return report | {"checks": json.loads(said.out)["data"]["checks"]}
    except (ValueError, KeyError):
        words = said.last_line or said.out.decode(errors="replace").strip() or "it said nothing"
        return report | {"error": f"`hetero-llm doctor` failed there: {words.splitlines()[-1]}"}
