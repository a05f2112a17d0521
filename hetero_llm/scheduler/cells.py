"""Cells: the devices of one accelerator type on one node. A group never mixes kinds or accelerators."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_llm.matrix import AcceleratorEntry, Matrix
from hetero_llm.model import Device, NodeInventory
from hetero_llm.scheduler.resources import USABLE_HEALTH, node_labels
from hetero_llm.scheduler.rules import UNKNOWN_KIND, KindRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Where groups of one shape can go.

    Attributes:
        host: the box the node runs on.
        alive: the node answers.
        labels: the node's own labels and those the cluster gives it, the latter with their prefix.
        versions: driver, toolkit, torch, vllm, plugin of the node as far as known.
        devices: all of them, unhealthy and held ones too, ascending by index.
        rules: the kind's limits.
        known: a plugin for the kind is loaded here, so `rules` are its own.
        entry: what the hardware matrix knows of the accelerator, None when it is not listed.
    """

    node: str
    host: str
    kind: str
    accelerator: str
    alive: bool
    labels: Mapping[str, str]
    versions: Mapping[str, str | None]
    devices: tuple[Device, ...]
    rules: KindRules
    known: bool
    entry: AcceleratorEntry | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What is free in a cell: the budgets of its healthy devices that nobody holds, in bytes, ascending."""

    cell: Cell
    budgets: tuple[int, ...]

    def fitting(self, least_bytes: int) -> int:
        """Return how many free devices may give `least_bytes` to an engine."""
        return len(self.budgets) - bisect_left(self.budgets, least_bytes)


def cells_of(nodes: Sequence[NodeInventory], rules: Mapping[str, KindRules], matrix: Matrix | None) -> tuple[Cell, ...]:
    """Return the cells of all nodes, in an order that does not depend on the order of `nodes`."""
    grouped: dict[tuple[str, str, str], list[Device]] = {}
    for node in nodes:
        for device in node.devices:
            grouped.setdefault((node.node, device.kind, device.accelerator), []).append(device)
    by_name = {node.node: node for node in nodes}
    labels = {node.node: {**node_labels(node), **node.labels} for node in nodes}
    return tuple(
        Cell(
            node=name,
            host=by_name[name].host,
            kind=kind,
            accelerator=accelerator,
            alive=by_name[name].alive,
            labels=labels[name],
            versions=by_name[name].versions,
            devices=tuple(sorted(devices, key=lambda device: (device.index, device.uid))),
            rules=rules.get(kind, UNKNOWN_KIND),
            known=kind in rules,
            entry=matrix.find(kind, accelerator) if matrix is not None else None,
        )
        for (name, kind, accelerator), devices in sorted(grouped.items())
    )


def room_in(cell: Cell, utilization: float) -> Room:
    """Return what is free in `cell` for engines that take `utilization` of a device."""
    return Room(
        cell=cell,
        budgets=tuple(sorted(free_budget_bytes(device, utilization) for device in cell.devices if is_free(device))),
    )


def is_free(device: Device) -> bool:
    """Say whether `device` is healthy and held by nobody, whatever memory it has."""
    return device.health in USABLE_HEALTH and device.held_by is None


def total_budget_bytes(device: Device, utilization: float) -> int:
    """Return what an engine may take of `device` when nobody else is on it; 0 when its size is not measured."""
    return int((device.memory_bytes or 0) * utilization)


def free_budget_bytes(device: Device, utilization: float) -> int:
    """Return what an engine may take of `device` now: what is already used by others is not there to be planned."""
    budget = total_budget_bytes(device, utilization)
    return budget if device.free_bytes is None else min(budget, device.free_bytes)
