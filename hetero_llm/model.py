"""The values that cross module and process borders: devices, nodes, models, plans, replicas.

All are frozen, slotted dataclasses of plain data, so `to_data` and `from_data` (msgspec) turn them into JSON and back
without a schema of their own. Absent or None means *not measured*, never zero. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

SCHEMA_VERSION = 1
"""Version of the JSON that commands print and read; raised when a reader of the old shape would be misled."""

T = TypeVar("T")


def to_data(value: object) -> Any:
    """Return `value` as builtins (dict, list, str, int, float, bool, None), ready for JSON."""
    return msgspec.to_builtins(value)


def from_data(data: object, kind: type[T]) -> T:
    """Build a `kind` from builtins.

    Raises:
        msgspec.ValidationError: a field is missing or has another type; the message names its path.
    """
    return msgspec.convert(data, kind)


# -- Inventory --------------------------------------------------------------------------------------------------------


class Health(StrEnum):
    """What the driver says of a device. Only `OK` and `DEGRADED` devices are planned on."""

    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One schedulable accelerator unit: a GPU, a MIG instance, one die of a two-die card, a group of CPU cores.

    Attributes:
        kind: the backend's short name, ``cuda``, ``ascend``, ``cpu`` ...
        accelerator: device type within the kind, ``910B2``; also a Ray resource and label value.
        uid: identity that survives renumbering; unique within the cluster.
        index: logical id on its node, what the visible-devices variable takes.
        physical_index: the ``/dev`` number where it differs in meaning from `index`.
        card: number of the card that carries this device (several dies may share one).
        memory_bytes: total memory the engine may plan with.
        free_bytes: memory free at the time of the reading.
        numa: NUMA node the device hangs on.
        cores: logical CPU ids of a core group, ascending; empty for devices that are not CPU cores.
        links: logical id of a peer on the same node to the link's name, ``{"1": "nvlink"}``.
        unified_memory: memory is the system's own.
        simulated: the device comes from an override, not from a driver; shown to users.
        stand_in: kind whose plugin provides the engine in the place of this kind's own; only for simulated devices.
            None on a simulated device of another kind than `sim` means that it can be planned on, not served.
        held_by: replica id that holds the device, None when free or not known.
    """

    kind: str
    accelerator: str
    uid: str
    index: int
    physical_index: int | None = None
    card: int | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    health: Health = Health.UNKNOWN
    numa: int | None = None
    cores: tuple[int, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    unified_memory: bool = False
    simulated: bool = False
    stand_in: str | None = None
    held_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something a backend noticed that hides or weakens devices, with the way out. `code` is an ``HLnnn``."""

    kind: str
    code: str
    text: str
    next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInventory:
    """One node = one raylet = one kind. A box with two vendors is two of these with the same `host`.

    Attributes:
        node: name of the node, unique in the cluster.
        address: IP address peers reach it at.
        versions: driver, toolkit, torch, vllm, plugin as far as known.
        ray_node_id: Ray's id, None offline.
        labels: what its owner calls the node, ``{"zone": "a"}``; wishes can ask for them.
    """

    node: str
    host: str
    address: str
    kind: str
    alive: bool = True
    versions: Mapping[str, str | None] = field(default_factory=dict)
    devices: tuple[Device, ...] = ()
    problems: tuple[Problem, ...] = ()
    ray_node_id: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """All nodes; the `data` of ``hetero-llm devices -o json``."""

    nodes: tuple[NodeInventory, ...] = ()


# -- Models and plans -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightShares:
    """Where a model's weights go when a group splits it, in bytes as the engine holds them.

    `embedding_bytes` + `output_bytes` + `layers_bytes` + `other_bytes` are what one device alone would hold.

    Attributes:
        embedding_bytes: token embedding; on the first pipeline stage, split by TP.
        output_bytes: output layer; on the last stage, split by TP. 0 when `tied`.
        tied: the embedding is the output layer too, so first and last stage both hold it.
        layers_bytes: all tensors that belong to a layer.
        largest_layer_bytes: the largest layer; layers of one model may differ.
        kv_bytes: K and V projections among `layers_bytes`; more TP ranks than KV heads hold copies.
        whole_bytes: tensors among `layers_bytes` that every TP rank holds whole: norms, routers, latent projections.
        other_bytes: the rest, a vision tower for example; on the first stage, split by TP.
    """

    embedding_bytes: int
    output_bytes: int
    tied: bool
    layers_bytes: int
    largest_layer_bytes: int
    kv_bytes: int
    whole_bytes: int
    other_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model folder says about itself, read from config.json and safetensors headers.

    Attributes:
        name: the name clients use.
        source: what the user wrote: alias, hub id, or folder.
        path: folder with the files, None when only headers are known.
        parameters: number of weights.
        weights_bytes: size of all tensors as stored.
        head_dim: elements per attention head.
        max_model_len: longest context in tokens that the model was made for.
        dtype: torch's name without prefix, ``bfloat16``.
        quantization: method named in the config, None for none.
        intermediate_size: width of the feed-forward layers, which TP splits; None when the config names none.
        latent_kv_size: elements per token and layer that latent attention (MLA) caches, the same on every TP rank;
            None for ordinary attention.
        active_parameters: number of weights one token meets, smaller than `parameters` for a mixture of experts; None
            when not known.
        quantization_group_size: weights that share a scale along the split dimension; TP must leave whole groups.
        weights: how TP and PP divide the weights; None when tensors were not looked at.
    """

    name: str
    source: str
    path: str | None = None
    architecture: str
    parameters: int
    weights_bytes: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    quantization: str | None = None
    intermediate_size: int | None = None
    latent_kv_size: int | None = None
    active_parameters: int | None = None
    quantization_group_size: int | None = None
    weights: WeightShares | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWish:
    """What a user asked for one model on one kind. None means: choose for me.

    Attributes:
        kinds: kinds allowed, in order of preference; empty means any kind except a silent fallback to ``cpu``.
        accelerator: only this accelerator.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        replicas: number of replicas; None means as many as fit.
        max_model_len: context length to serve, None means the model's own.
        kv_cache_bytes: KV cache per device; None means what the plan leaves.
        gpu_memory_utilization: share of a device's memory the engine may take.
        kv_cache_dtype: the engine's name of the cache's type, ``fp8``; None or ``auto`` is the model's 16-bit type.
        labels: labels a node must have, ``{"zone": "a"}``; the cluster's own need no prefix, ``{"host": "box-1"}``.
    """

    kinds: tuple[str, ...] = ()
    accelerator: str | None = None
    tp: int | None = 1
    pp: int | None = 1
    replicas: int | None = 1
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_dtype: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Devices of one replica on one node, by uid, in rank order."""

    node: str
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes on each device of a replica: weights + KV cache + overhead = per_device_bytes."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int
    per_device_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """First guess of a replica's speed, from the matrix's roofline or from measurement."""

    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One replica to be: where it goes, what it costs, and why there.

    Attributes:
        id: ``<model>-<kind>-<n>``, unique in the plan.
        kv_tokens: tokens the KV cache holds.
        why: one sentence for a person.
        simulated: its devices come from an override, not from a driver.
        labels: what was asked of its node's labels.
    """

    id: str
    kind: str
    accelerator: str
    tp: int
    pp: int
    placement: tuple[Placement, ...]
    memory: MemoryEstimate
    kv_tokens: int
    max_model_len: int
    estimate: SpeedEstimate | None = None
    why: str
    simulated: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Why a node (or a device of it) is not used. `rule` is one of INTERFACES' names; `reason` has both numbers."""

    node: str
    kind: str
    accelerator: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The `data` of ``hetero-llm plan -o json``. Feasible only if every replica asked for has a place.

    Attributes:
        replicas: those that have a place, also when others have none.
        rejections: when infeasible, the nearest miss first; ``*`` as node, kind and accelerator stands for all.
        alternatives: when infeasible, what would fit instead, one sentence each.
    """

    model: ModelFacts
    feasible: bool
    replicas: tuple[ReplicaPlan, ...] = ()
    rejections: tuple[Rejection, ...] = ()
    alternatives: tuple[str, ...] = ()


# -- Running replicas -------------------------------------------------------------------------------------------------


class ReplicaState(StrEnum):
    """Life of a replica. Only `READY` ones get traffic."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """What a replica says of itself at each lease renewal; what `status` and the gateway's routing table show.

    Attributes:
        replica: id, unique in the cluster and new for each start of the actor.
        model: name clients use.
        app: Serve application the replica belongs to.
        devices: uids in rank order.
        cores: logical CPU ids of those devices; empty for devices that are not CPU cores.
        endpoint: ``host:port`` of the engine; None until it listens.
        phase: what the engine is doing while `STARTING`, ``loading weights``.
        phase_since_s: seconds since that phase began.
        started_unix_s: wall clock of the actor's start.
        ready_after_s: seconds from actor start to the first generated token.
        max_model_len: context length the engine serves.
        kv_tokens: KV cache size the engine reported.
        group_bandwidth_bytes_per_s: of the slowest rank in the pre-flight's all-reduce; None when none was run.
        versions: engine versions.
        engine_pid: root of the engine's process tree.
        actor_pid: the replica actor's process.
        log: path of the engine's log on its node.
        error: the root cause when `FAILED`, as an ErrorReport in builtins.
    """

    replica: str
    model: str
    app: str
    kind: str
    accelerator: str
    node: str
    state: ReplicaState
    tp: int = 1
    pp: int = 1
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()
    endpoint: str | None = None
    phase: str | None = None
    phase_since_s: float | None = None
    started_unix_s: float
    ready_after_s: float | None = None
    max_model_len: int | None = None
    kv_tokens: int | None = None
    group_bandwidth_bytes_per_s: float | None = None
    running: int | None = None
    waiting: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    simulated: bool = False
    engine_pid: int | None = None
    actor_pid: int | None = None
    log: str | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One replica as the gateway sees it: enough to route and to label the answer.

    Attributes:
        replica: replica id, sent back as ``x-hetero-replica``.
        host: address of the engine's HTTP server.
        port: its TCP port.
    """

    replica: str
    model: str
    kind: str
    accelerator: str
    host: str
    port: int
    max_model_len: int | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A configured model, ready or not, as ``/v1/models`` shows it. A model stays listed while it has no replica."""

    name: str
    source: str
    created_unix_s: int
    kinds: tuple[str, ...] = ()
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTable:
    """All a gateway needs to know, sent whole at every change. `version` only grows.

    Attributes:
        version: raised by the scheduler at each change.
        models: every configured model.
        targets: ready replicas only.
        replicas: full status of all replicas, for ``/status``.
        notes: model to what people should know about it, for example that a replica has no place.
    """

    version: int
    models: tuple[ModelEntry, ...] = ()
    targets: tuple[Target, ...] = ()
    replicas: tuple[ReplicaStatus, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
