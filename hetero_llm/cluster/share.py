"""One node's share of a replica: the devices it holds there, and the engine process on them.

A replica on one node has one share. A group over nodes has one per node; the first one's engine answers requests, the
others run headless.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray

from hetero_llm.cluster.engine_process import EngineProcess
from hetero_llm.cluster.lease import DeviceLease
from hetero_llm.cluster.nodes import node_here
from hetero_llm.cluster.replica_spec import Member, ReplicaSpec
from hetero_llm.cluster.stand_in import engine_launch
from hetero_llm.cluster.state import state_dir
from hetero_llm.errors import DeviceBusy
from hetero_llm.model import Device
from hetero_llm.plugin import Backend, EngineSpec, RootCausePattern
from hetero_llm.plugin.manager import PluginManager
from hetero_llm.scheduler.resources import USABLE_HEALTH

WANTED_WAIT_S = 10.0
"""A killed predecessor keeps its devices until its engine is gone, some seconds at most."""

DEVICE_WAIT_S = 30.0
"""How long any device is waited for; Ray has counted that there is one."""

_log = logging.getLogger(__name__)


class EngineShare:
    """The share of the node this process runs on.

    Attributes:
        member: the node and the devices held, in rank order; None before `take_devices`.
        engine: the engine process; None before `launch`.
    """

    def __init__(self, spec: ReplicaSpec, replica: str):
        """Hold nothing yet."""
        self.member: Member | None = None
        self.engine: EngineProcess | None = None
        self._spec = spec
        self._replica = replica
        self._lease: DeviceLease | None = None

    def take_devices(self, plugins: PluginManager) -> Member:
        """Hold this node's devices of the group: those Ray assigned, ascending, or leased ones, the planned first.

        Raises:
            DeviceBusy: too few are free and usable, or Ray assigned others than the node has.
            NodeUnknown: this Ray node was not registered.
            UnknownKind: this node has no plugin for the kind.
        """
        node, spec, count = node_here(), self._spec, self._spec.devices_per_node
        backend = plugins.backend(spec.kind)
        usable = {
            device.uid: device
            for device in node.devices
            if device.accelerator == spec.accelerator and device.health in USABLE_HEALTH
        }
        if backend.native_resource is None:
            # Ray may put more on a node than the plan had.
            wanted = [uid for uid in spec.planned if uid in usable]
        else:
            # Leased as well: another cluster on this machine must not take them, nor leftovers stay behind. Ray hands
            # out all of a node, also what has failed since or is of another type. Who gets such a device takes one that
            # is neither, and whoever that was meant for does the same.
            wanted = [device.uid for device in _assigned_devices(backend, node.devices, count) if device.uid in usable]
        self._lease = self._lease_of(wanted, [uid for uid in usable if uid not in wanted], count)
        devices = [usable[uid] for uid in self._lease.uids]
        if backend.native_resource is not None:
            # Some vendors' runtimes do not accept ids in another order.
            devices.sort(key=lambda device: device.index)
        self.member = Member(node=node.node, address=node.address, devices=tuple(devices))
        return self.member

    def _lease_of(self, wanted: Sequence[str], others: Sequence[str], count: int) -> DeviceLease:
        """Lease the devices that are wanted, or others too when those stay taken."""
        if len(wanted) >= count:
            try:
                return DeviceLease.acquire(wanted, count, self._replica, deadline_s=WANTED_WAIT_S)
            except DeviceBusy:
                _log.info("%s: the wanted devices are taken: %s", self._replica, ", ".join(wanted))
        return DeviceLease.acquire((*wanted, *others), count, self._replica, deadline_s=DEVICE_WAIT_S)

    def launch(self, engine: EngineSpec, plugins: PluginManager) -> EngineProcess:
        """Start the engine of this share; `take_devices` came before.

        Raises:
            EngineFailed: the program cannot be started at all.
        """
        assert self.member is not None
        backend = plugins.backend(self._spec.kind)
        launch = engine_launch(backend, plugins, engine)
        launch = replace(
            launch,
            env={**backend.device_env(self.member.devices), **launch.env},
            env_remove=(*launch.env_remove, *backend.other_visible_envs),
            start_deadline_s=min(launch.start_deadline_s, self._spec.start_deadline_s),
        )
        self.engine = EngineProcess(
            launch,
            replica=self._replica,
            address=(engine.host, engine.port),
            served_name=engine.served_name,
            log_path=_log_path(self._replica, engine.node_rank),
            hints=plugins.error_hints(),
            pass_fds=self._lease.fds if self._lease else (),
        )
        self.note_leftovers()
        return self.engine

    def note_leftovers(self) -> None:
        """Write down what is to be swept up if this process and the engine are killed."""
        if self._lease is not None and self.engine is not None:
            engine = self.engine
            self._lease.note(scratch=engine.scratch, shm=engine.shared_memory(), shm_prefix=engine.shm_prefix)

    def stop(self) -> None:
        """End the engine and let go of the devices. Safe to call twice."""
        if self.engine is not None:
            self.engine.stop()
        if self._lease is not None:
            self._lease.release()


def preflight_hints(
    spec: ReplicaSpec, members: Sequence[Member], plugins: PluginManager
) -> tuple[RootCausePattern, ...]:
    """Return the patterns that put a collective library's codes into words: the engine's own, then the plugins'."""
    launch = plugins.backend(spec.kind).engine(spec.engine(members, 0, 0, 0 if spec.nodes > 1 else None))
    return (*launch.root_causes, *plugins.error_hints())


def free_port(address: str) -> int:
    """Return a TCP port that is free at `address` of this node now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _assigned_devices(backend: Backend, devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """Return the devices Ray assigned."""
    assert backend.native_resource is not None
    ids = ray.get_runtime_context().get_accelerator_ids().get(backend.native_resource, [])
    by_id = {name: device for device in devices for name in (str(device.index), device.uid)}
    missing = [name for name in ids if name not in by_id]
    if missing or len(ids) != count:
        raise DeviceBusy(
            f"Ray assigned {backend.native_resource} {','.join(ids) or 'none'}, the node has "
            f"{','.join(str(device.index) for device in devices)} and the replica needs {count}",
            next=("hetero-llm devices", "hetero-llm status"),
        )
    return tuple(by_id[name] for name in ids)


def _log_path(replica: str, node_rank: int) -> Path:
    return state_dir() / "logs" / (f"{replica}.log" if node_rank == 0 else f"{replica}.node{node_rank}.log")
