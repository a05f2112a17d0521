"""The doctor's checks of a whole cluster: that its nodes agree with each other, and Ray with what they discovered."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from hetero_llm.plugin import Check
from hetero_llm.scheduler.resources import node_resources

if TYPE_CHECKING:
    from hetero_llm.cluster.doctor import NodeAnswer

MAX_CLOCK_OFFSET_S = 5.0
"""Leases, logs and statistics of several nodes are compared by wall clock; tokens of proxies expire by it."""


def cluster_checks(answers: Sequence[NodeAnswer], native: Mapping[str, str | None]) -> tuple[Check, ...]:
    """Return the checks that compare nodes.

    Args:
        native: Ray resource that hands out device ids, by kind.
    """
    return (
        check_answers(answers),
        check_same("cluster.ray", "Ray", answers, lambda answer: answer.ray_version),
        check_same("cluster.python", "Python", answers, lambda answer: answer.python_version),
        check_clocks(answers),
        check_addresses(answers),
        *(check_counts(answer, native) for answer in answers if answer.inventory is not None),
    )


def check_answers(answers: Sequence[NodeAnswer]) -> Check:
    """Return whether every node is registered and answered."""
    silent = [f"{answer.node}: {answer.error}" for answer in answers if answer.error]
    foreign = [answer.node for answer in answers if answer.inventory is None]
    text = "; ".join((*silent, *(f"{name} was not registered with hetero-llm" for name in foreign)))
    if not text:
        return Check(name="cluster.nodes", ok=True, text=f"{len(answers)} nodes, all answer")
    advice = ("hetero-llm node list",)
    return Check(name="cluster.nodes", ok=False, text=text, next=advice)


def check_same(
    name: str, what: str, answers: Sequence[NodeAnswer], version_of: Callable[[NodeAnswer], str | None]
) -> Check:
    """Return whether all nodes run the same version of something: Ray wants its own and Python's equal to the patch."""
    nodes: dict[str, list[str]] = {}
    for answer in answers:
        version = version_of(answer)
        if version is not None:
            nodes.setdefault(version, []).append(answer.node)
    text = "; ".join(f"{what} {version} on {', '.join(there)}" for version, there in sorted(nodes.items()))
    if not nodes:
        return Check(name=name, ok=None, text=f"no node said which {what} it runs")
    if len(nodes) == 1:
        return Check(name=name, ok=True, text=f"{what} {next(iter(nodes))} on all nodes that answered")
    most = max(nodes, key=lambda version: len(nodes[version]))
    return Check(name=name, ok=False, text=text, next=(f"install {what} {most} on every node",))


def check_clocks(answers: Sequence[NodeAnswer]) -> Check:
    """Return whether the nodes' wall clocks agree with this machine's."""
    measured = {a.node: (a.clock_offset_s, a.clock_error_s or 0.0) for a in answers if a.clock_offset_s is not None}
    if not measured:
        return Check(name="cluster.clock", ok=None, text="no clock was measured")
    # What the round trip leaves open is counted in the node's favour.
    wrong = {node: offset for node, (offset, error) in measured.items() if abs(offset) - error > MAX_CLOCK_OFFSET_S}
    if wrong:
        text = ", ".join(f"{node} {offset:+.1f} s" for node, offset in sorted(wrong.items()))
        advice = ("timedatectl set-ntp true   (on those nodes)",)
        return Check(name="cluster.clock", ok=False, text=f"clocks that differ from here: {text}", next=advice)
    worst = max(abs(offset) for offset, _ in measured.values())
    return Check(name="cluster.clock", ok=True, text=f"clocks agree within {worst:.1f} s")


def check_addresses(answers: Sequence[NodeAnswer]) -> Check:
    """Return whether a cluster of several hosts uses addresses that the others can reach."""
    nodes = [answer.inventory for answer in answers if answer.inventory is not None]
    hosts = {node.host for node in nodes}
    local = [node.node for node in nodes if _is_loopback(node.address)]
    if len(hosts) > 1 and local:
        text = f"{', '.join(local)} is at a loopback address; the other hosts cannot reach it"
        advice = ("join with the address of a real interface: hetero-llm node join … --address-of-this-node IP",)
        return Check(name="cluster.addresses", ok=False, text=text, next=advice)
    where = ", ".join(sorted({node.address for node in nodes}))
    return Check(name="cluster.addresses", ok=True, text=f"{len(hosts)} host(s) at {where or 'no address'}")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def check_counts(answer: NodeAnswer, native: Mapping[str, str | None]) -> Check:
    """Return whether Ray counts as many devices of a node as it published as usable."""
    name = f"{answer.node}.count"
    node = answer.inventory
    if node is None or not node.alive:
        return Check(name=name, ok=None, text="the node is down")
    wanted = node_resources(node, native.get(node.kind))
    seen = {resource: answer.resources.get(resource, 0.0) for resource in wanted}
    text = ", ".join(f"{resource} {seen[resource]:g}" for resource in sorted(wanted)) or "no usable device"
    wrong = [f"{key} {wanted[key]:g} found, {seen[key]:g} in Ray" for key in sorted(wanted) if wanted[key] != seen[key]]
    if wrong:
        advice = (f"start the node again: hetero-llm node leave and join, on {node.host}",)
        return Check(name=name, ok=False, text="; ".join(wrong), next=advice)
    return Check(name=name, ok=True, text=f"Ray agrees: {text}")
