"""What the replicas of one Serve application are started from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_llm.model import Device
from hetero_llm.plugin import EngineSpec, GroupSpec, RankSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One node's part in a group: its devices in rank order, and the address it is reached at."""

    node: str
    address: str
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpec:
    """What every replica of one Serve application is started from; crosses to the actor as builtins.

    Attributes:
        app: Serve application.
        model: name clients use.
        path: model folder, the same on every node.
        planned: uids of the devices the plan gave to this application; a replica prefers those of its node.
        nodes: nodes of one group; its ranks are spread evenly over them.
        labels: what is asked of those nodes' labels.
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
    nodes: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    engine_args: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    start_deadline_s: float = 600.0

    @property
    def devices_per_node(self) -> int:
        """Devices a group takes on each of its nodes."""
        return self.tp * self.pp // self.nodes

    def engine(self, members: Sequence[Member], node_rank: int, port: int, master_port: int | None) -> EngineSpec:
        """Return what a backend is told about the engine process of one node of the group.

        Args:
            members: all nodes of the group, in order.
            node_rank: position of the node in `members`.
            port: of that node's HTTP server.
            master_port: where the nodes meet, at the first one's address; None with a single node.
        """
        return EngineSpec(
            model_path=self.path,
            served_name=self.model,
            devices=tuple(device for member in members for device in member.devices),
            tp=self.tp,
            pp=self.pp,
            host=members[node_rank].address,
            port=port,
            max_model_len=self.max_model_len,
            kv_cache_bytes=self.kv_cache_bytes,
            gpu_memory_utilization=self.gpu_memory_utilization,
            dtype=self.dtype,
            extra_args=self.engine_args,
            options=self.options,
            node_count=len(members),
            node_rank=node_rank,
            master_address=members[0].address if len(members) > 1 else None,
            master_port=master_port,
        )

    def group(self, members: Sequence[Member], master_port: int) -> GroupSpec:
        """Return the ranks of a group, which meet at `master_port` of the first node."""
        places = ((member, device) for member in members for device in member.devices)
        ranks = (
            RankSpec(rank=rank, node=member.node, address=member.address, device=device)
            for rank, (member, device) in enumerate(places)
        )
        address = members[0].address
        return GroupSpec(ranks=tuple(ranks), tp=self.tp, pp=self.pp, master_address=address, master_port=master_port)
