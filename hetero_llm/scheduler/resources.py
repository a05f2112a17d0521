"""Names and amounts under which a node's devices stand in Ray, and what a replica asks of them.

Ray's own resource (``GPU``, ``NPU``) hands out device ids; our two counters guarantee kind and accelerator type. A
replica always asks for all of them, so that the counts agree.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from hetero_llm.model import Device, Health, NodeInventory, ReplicaPlan
from hetero_llm.plugin import Backend

LABEL_PREFIX = "hetero-llm.io/"

USABLE_HEALTH = frozenset({Health.OK, Health.DEGRADED})
"""Devices of other health are listed, but neither registered nor planned on."""

NATIVE_RESOURCES = ("GPU", "NPU")
"""Ray detects one accelerator family by itself, at random on a box with two; a stated amount, zero too, stops that."""

_LABEL_MAX = 63
_CLUSTER_LABELS = ("kind", "accelerator", "host", "vllm", "driver")


def kind_resource(kind: str) -> str:
    """Return the counter of all devices of a kind, ``hetero_cpu``."""
    return f"hetero_{kind}"


def accelerator_resource(kind: str, accelerator: str) -> str:
    """Return the counter of one accelerator type, ``hetero_ascend:910B2``."""
    return f"hetero_{kind}:{accelerator}"


def node_resources(node: NodeInventory, native_resource: str | None) -> dict[str, float]:
    """Return the Ray resources of a node: both counters and the kind's native resource, zero included.

    Only devices whose health is ok or degraded are counted.
    """
    resources = {} if native_resource is None else {native_resource: 0.0}
    for device in node.devices:
        if device.health in USABLE_HEALTH:
            for name in replica_resources(device.kind, device.accelerator, native_resource, 1):
                resources[name] = resources.get(name, 0.0) + 1.0
    return resources


def explicit_resources(nodes: Sequence[NodeInventory], native: Mapping[str, str | None]) -> dict[str, float]:
    """Return the resources of one raylet that carries all of `nodes`, with a zero for each native resource unused.

    Args:
        native: native resource by kind.
    """
    resources = dict.fromkeys(NATIVE_RESOURCES, 0.0)
    for node in nodes:
        for name, amount in node_resources(node, native.get(node.kind)).items():
            resources[name] = resources.get(name, 0.0) + amount
    return resources


def replica_resources(kind: str, accelerator: str, native_resource: str | None, devices: int) -> dict[str, float]:
    """Return what a replica on `devices` devices asks of its node."""
    names = (kind_resource(kind), accelerator_resource(kind, accelerator))
    asked = dict.fromkeys(names, float(devices))
    if native_resource is not None:
        asked[native_resource] = float(devices)
    return asked


def raylet_environ(node: NodeInventory, backend: Backend) -> dict[str, str]:
    """Return the variables a node's raylet takes the ids from that it hands out: those of usable devices only.

    Left to itself Ray counts from 0, and would assign a device that failed. Empty where devices are leased.
    """
    if backend.native_resource is None:
        return {}
    return dict(backend.device_env([device for device in node.devices if device.health in USABLE_HEALTH]))


def has_labels(node: NodeInventory, labels: Mapping[str, str]) -> bool:
    """Return whether a node has all `labels`, its own or the cluster's, the latter with or without their prefix."""
    has = {**node_labels(node), **node.labels}
    return all(has.get(name, has.get(LABEL_PREFIX + name)) == value for name, value in labels.items())


def label_selector(labels: Mapping[str, str]) -> dict[str, str]:
    """Return `labels` as Ray must be asked for them: the cluster's own with their prefix."""
    return {LABEL_PREFIX + name if name in _CLUSTER_LABELS else name: value for name, value in labels.items()}


def node_labels(node: NodeInventory) -> dict[str, str]:
    """Return the Ray labels of a node, ``hetero-llm.io/{kind,accelerator,host,vllm,driver}``; unknown ones left out.

    A node with several accelerator types has them joined by ``_``.
    """
    values: Mapping[str, str | None] = {
        "kind": node.kind,
        "accelerator": "_".join(sorted({device.accelerator for device in node.devices})),
        "host": node.host,
        "vllm": node.versions.get("vllm"),
        "driver": node.versions.get("driver"),
    }
    labels = {LABEL_PREFIX + name: label_value(value) for name, value in values.items() if value}
    return {name: value for name, value in labels.items() if value}


def label_value(text: str) -> str:
    """Return `text` as a Ray label value: at most 63 of ``[A-Za-z0-9._-]``, a letter or digit at both ends."""
    allowed = re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:_LABEL_MAX]
    return allowed.strip("._-")


def hold(nodes: Sequence[NodeInventory], replicas: Iterable[ReplicaPlan]) -> tuple[NodeInventory, ...]:
    """Return `nodes` with the devices of `replicas` marked as held."""
    holder = {uid: replica.id for replica in replicas for place in replica.placement for uid in place.devices}
    return tuple(replace(node, devices=tuple(_held(device, holder) for device in node.devices)) for node in nodes)


def _held(device: Device, holder: Mapping[str, str]) -> Device:
    return replace(device, held_by=holder[device.uid]) if device.uid in holder else device
