"""What the replicas of one Serve application are started from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.model import Device
from hetero_llm.plugin import EngineSpec, GroupSpec, RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What every replica of one Serve application is started from; crosses to the actor as builtins.

    Attributes:
        app: Serve application.
        model: name clients use.
        path: model folder on the node.
        node: node name.
        address: IP address the engine binds and is reached at.
        devices: devices the plan gave to this application; each replica takes ``tp * pp`` of them.
        kv_cache_bytes: KV cache per device.
    """

    app: str
    model: str
    path: str
    kind: str
    accelerator: str
    node: str
    address: str
    devices: tuple[Device, ...]
    tp: int
    pp: int
    max_model_len: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    engine_args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    start_deadline_s: float = 600.0

    def engine(self, devices: tuple[Device, ...], port: int) -> EngineSpec:
        """Return what a backend is told about the engine on `devices`, whose HTTP server gets `port`."""
        return EngineSpec(
            model_path=self.path,
            served_name=self.model,
            devices=devices,
            tp=self.tp,
            pp=self.pp,
            host=self.address,
            port=port,
            max_model_len=self.max_model_len,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            dtype=self.dtype,
            extra_args=self.engine_args,
            options=self.options,
        )

    def group(self, devices: tuple[Device, ...], master_port: int) -> GroupSpec:
        """Return the ranks of a group on `devices`, which meet at `master_port` of this node."""
        ranks = (
            RankSpec(rank=rank, node=self.node, address=self.address, device=device)
            for rank, device in enumerate(devices)
        )
        return GroupSpec(
            ranks=tuple(ranks), tp=self.tp, pp=self.pp, master_address=self.address, master_port=master_port
        )
