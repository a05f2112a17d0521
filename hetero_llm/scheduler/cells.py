"""Cells: the devices of one accelerator type on one node. A group never leaves its cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.matrix import AcceleratorEntry, Matrix
from hetero_llm.model import Device, NodeInventory
from hetero_llm.scheduler.rules import UNKNOWN_KIND, KindRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where groups of one shape can go.

    Attributes:
        alive: the node answers.
        devices: all of them, unhealthy and held ones too, ascending by index.
        rules: the kind's limits.
        known: a plugin for the kind is loaded here, so `rules` are its own.
        entry: what the hardware matrix knows of the accelerator, None when it is not listed.
    """

    node: str
    kind: str
    accelerator: str
    alive: bool
    devices: tuple[Device, ...]
    rules: KindRules
    known: bool
    entry: AcceleratorEntry | None


def cells_of(nodes: Sequence[NodeInventory], rules: Mapping[str, KindRules], matrix: Matrix | None) -> tuple[Cell, ...]:
    """Return the cells of all nodes, in an order that does not depend on the order of `nodes`."""
    grouped: dict[tuple[str, str, str], list[Device]] = {}
    alive = {node.node: node.alive for node in nodes}
    for node in nodes:
        for device in node.devices:
            grouped.setdefault((node.node, device.kind, device.accelerator), []).append(device)
    return tuple(
        Cell(
            node=node_name,
            kind=kind,
            accelerator=accelerator,
            alive=alive[node_name],
            devices=tuple(sorted(devices, key=lambda device: (device.index, device.uid))),
            rules=rules.get(kind, UNKNOWN_KIND),
            known=kind in rules,
            entry=matrix.find(kind, accelerator) if matrix is not None else None,
        )
        for (node_name, kind, accelerator), devices in sorted(grouped.items())
    )


def total_budget_bytes(device: Device, utilization: float) -> int:
    """Return what an engine may take of `device` when nobody else is on it; 0 when its size is not measured."""
    return int((device.memory_bytes or 0) * utilization)


def free_budget_bytes(device: Device, utilization: float) -> int:
    """Return what an engine may take of `device` now: what is already used by others is not there to be planned."""
    budget = total_budget_bytes(device, utilization)
    return budget if device.free_bytes is None else min(budget, device.free_bytes)
