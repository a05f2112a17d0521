"""What the replicas of one Serve application are started from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.model import Device, NodeInventory
from hetero_llm.plugin import EngineSpec, GroupSpec, RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What every replica of one Serve application is started from; crosses to the actor as builtins.

    Attributes:
        app: Serve application.
        model: name clients use.
        path: model folder, the same on every node.
        planned: uids of the devices the plan gave to this application; a replica prefers those of its node.
        kv_cache_bytes: KV cache per device.
    """

    app: str
    model: str
    path: str
    kind: str
    accelerator: str
    planned: tuple[str, ...]
    tp: int
    pp: int
    max_model_len: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    engine_args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    start_deadline_s: float = 600.0

    def engine(self, node: NodeInventory, devices: tuple[Device, ...], port: int) -> EngineSpec:
        """Return what a backend is told about the engine on `devices` of `node`, whose HTTP server gets `port`."""
        return EngineSpec(
            model_path=self.path,
            served_name=self.model,
            devices=devices,
            tp=self.tp,
            pp=self.pp,
            host=node.address,
            port=port,
            max_model_len=self.max_model_len,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            dtype=self.dtype,
            extra_args=self.engine_args,
            options=self.options,
        )

    def group(self, node: NodeInventory, devices: tuple[Device, ...], master_port: int) -> GroupSpec:
        """Return the ranks of a group on `devices` of `node`, which meet at its `master_port`."""
        ranks = (
            RankSpec(rank=rank, node=node.node, address=node.address, device=device)
            for rank, device in enumerate(devices)
        )
        return GroupSpec(
            ranks=tuple(ranks), tp=self.tp, pp=self.pp, master_address=node.address, master_port=master_port
        )
