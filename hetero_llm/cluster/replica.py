"""EngineReplica: the actor that holds a replica's devices and runs its engine. The same for every kind.

A Serve deployment, so Ray keeps the wanted number alive. The actor stays light: no torch, no vllm. Requests do not pass
through it; the gateway talks to the engine directly.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from hetero_llm.cluster.controller import find_scheduler
from hetero_llm.cluster.engine_process import EngineProcess
from hetero_llm.cluster.group import run_preflight
from hetero_llm.cluster.lease import DeviceLease
from hetero_llm.cluster.names import LEASE_PERIOD_S
from hetero_llm.cluster.nodes import node_here
from hetero_llm.cluster.ray_private import bind_serve_rpc
from hetero_llm.cluster.replica_spec import ReplicaSpec
from hetero_llm.cluster.resident import release_startup_pages
from hetero_llm.cluster.stand_in import engine_launch
from hetero_llm.cluster.state import state_dir
from hetero_llm.errors import DeviceBusy, EngineNotReady, HeteroError, InternalError, NoReadyReplica
from hetero_llm.model import Device, ReplicaState, ReplicaStatus, from_data, to_data
from hetero_llm.plugin import Backend
from hetero_llm.plugin.manager import PluginManager, load_plugins
from hetero_llm.scheduler.resources import USABLE_HEALTH

DEVICE_WAIT_S = 30.0
"""A killed predecessor keeps its devices until its engine is gone, some seconds at most."""

DRAIN_S = 600.0
"""Longest time a replica that leaves may take to finish what it answers."""

TABLE_DELAY_S = 0.3
"""Time a changed routing table takes to every gateway, generously."""

SHM_NOTE_PERIOD_S = 2.0
"""How often the list of what to sweep after a crash is brought up to date."""


class EngineReplica:
    """The actor. Its constructor returns when the engine has generated its first token."""

    async def __init__(self, spec: Mapping[str, Any]):  # type: ignore[misc]  # Serve awaits it
        """Take devices, check the group, start the engine, wait until it generates.

        Raises:
            HeteroError: what failed; it has been reported to the scheduler too.
        """
        self._spec = from_data(spec, ReplicaSpec)
        bind_serve_rpc(ray.util.get_node_ip_address())
        self._replica = f"{self._spec.app}-{secrets.token_hex(3)}"
        self._stopping = threading.Event()
        self._engine: EngineProcess | None = None
        self._lease: DeviceLease | None = None
        self._node = node_here()
        self._devices: tuple[Device, ...] = ()
        self._endpoint: tuple[str, int] | None = None
        self._launched_phase = "taking devices"
        self._state = ReplicaState.STARTING
        self._error: HeteroError | None = None
        self._started_unix_s = time.time()
        self._ready_after_s: float | None = None
        self._scheduler = find_scheduler()
        self._renewal = asyncio.create_task(self._renew_forever())
        try:
            await asyncio.to_thread(self._start)
        except Exception as error:
            await self._fail(error)
            raise
        self._state = ReplicaState.READY
        self._ready_after_s = time.time() - self._started_unix_s
        await self._renew()
        release_startup_pages()
        self._watch = asyncio.create_task(self._watch_engine())

    # -- the actor interface, the same for every kind ------------------------------------------------------------------

    async def endpoint(self) -> str | None:
        """Return ``host:port`` of the engine's HTTP server; None before it is ready."""
        return self._status().endpoint

    async def stats(self) -> dict[str, Any]:
        """Return the replica's `ReplicaStatus` as builtins."""
        status: dict[str, Any] = to_data(self._status())
        return status

    async def generate(self, body: bytes) -> tuple[int, bytes]:
        """Send a completion request (OpenAI's JSON, not streamed) to the engine; return its status and answer."""
        if self._engine is None or self._state is not ReplicaState.READY:
            raise NoReadyReplica(f"{self._replica} is {self._state.value}", next=("hetero-llm status",))
        return await asyncio.to_thread(self._engine.complete, body)

    async def health(self) -> str:
        """Return the replica's state, a `ReplicaState` value."""
        return self._state.value

    async def drain(self) -> None:
        """Leave the routing table and return when what is being answered is finished."""
        self._state = ReplicaState.DRAINING
        await self._renew()
        await asyncio.to_thread(self._drain)

    async def stop(self) -> None:
        """Drain, then end the actor and its engine. Serve starts another one unless it wants fewer now."""
        await self.drain()
        await asyncio.to_thread(self._stop)
        os._exit(0)

    async def check_health(self) -> None:
        """Serve's health check. Light on purpose: a busy engine is healthy, a dead one has ended the actor already."""
        if self._engine is not None and self._engine.exit_code() is not None:
            raise self._engine.failure()

    async def __del__(self) -> None:
        """Serve's graceful stop: leave the routing table, finish what is being answered, end the engine."""
        if self._state is ReplicaState.FAILED:
            return  # Serve calls this after a failed start too; what failed must stay to be seen
        if self._state is ReplicaState.READY:
            await self.drain()
        self._state = ReplicaState.DRAINING
        await self._renew()
        await asyncio.to_thread(self._stop)
        self._state = ReplicaState.STOPPED
        self._renewal.cancel()
        await self._renew()

    # -- start and stop, in a worker thread ----------------------------------------------------------------------------

    def _start(self) -> None:
        spec, plugins = self._spec, load_plugins()
        backend, address = plugins.backend(spec.kind), self._node.address
        self._devices = self._take_devices(backend)
        port = _free_port(address)
        if len(self._devices) > 1:
            self._go_on_to("checking the group")
            group = spec.group(self._node, self._devices, master_port=_free_port(address))
            run_preflight(backend.group(group), group)
        self._go_on_to("starting")
        self._engine = self._launch(backend, plugins, port)
        self._endpoint = (address, port)
        self._note_leftovers()
        self._engine.wait_ready(self._stopping)
        self._note_leftovers()

    def _go_on_to(self, phase: str) -> None:
        if self._stopping.is_set():
            raise EngineNotReady(f"{self._replica} was stopped while it was {self._launched_phase}")
        self._launched_phase = phase

    def _take_devices(self, backend: Backend) -> tuple[Device, ...]:
        spec, count = self._spec, self._spec.tp * self._spec.pp
        usable = [
            device
            for device in self._node.devices
            if device.accelerator == spec.accelerator and device.health in USABLE_HEALTH
        ]
        if backend.native_resource is not None:
            return _assigned_devices(backend, usable, count)
        by_uid = {device.uid: device for device in usable}
        planned = tuple(uid for uid in spec.planned if uid in by_uid)
        # Ray chooses the node; it may put more replicas on one than the plan had there.
        wanted = planned if len(planned) >= count else tuple(by_uid)
        self._lease = DeviceLease.acquire(wanted, count, self._replica, deadline_s=DEVICE_WAIT_S)
        return tuple(by_uid[uid] for uid in self._lease.uids)

    def _launch(self, backend: Backend, plugins: PluginManager, port: int) -> EngineProcess:
        spec = self._spec
        launch = engine_launch(backend, plugins, spec.engine(self._node, self._devices, port))
        launch = replace(
            launch,
            env={**backend.device_env(self._devices), **launch.env},
            env_remove=(*launch.env_remove, *backend.other_visible_envs),
            start_deadline_s=min(launch.start_deadline_s, spec.start_deadline_s),
        )
        return EngineProcess(
            launch,
            replica=self._replica,
            address=(self._node.address, port),
            served_name=spec.model,
            log_path=_log_path(self._replica),
            hints=plugins.error_hints(),
            pass_fds=self._lease.fds if self._lease else (),
        )

    def _drain(self) -> None:
        assert self._engine is not None
        # Gateways learn of the new table within milliseconds; what they sent before that must have arrived.
        time.sleep(TABLE_DELAY_S)
        deadline = time.monotonic() + DRAIN_S
        while self._engine.exit_code() is None and self._engine.requests_in_flight() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _stop(self) -> None:
        self._stopping.set()
        if self._engine is not None:
            self._engine.stop()
        if self._lease is not None:
            self._lease.release()

    def _note_leftovers(self) -> None:
        if self._lease is not None and self._engine is not None:
            engine = self._engine
            self._lease.note(scratch=engine.scratch, shm=engine.shared_memory(), shm_prefix=engine.shm_prefix)

    # -- what the scheduler is told ------------------------------------------------------------------------------------

    async def _fail(self, error: Exception) -> None:
        if self._stopping.is_set():
            # __del__ is at work and what failed is the start it interrupted; it may have come before the engine did.
            await asyncio.to_thread(self._stop)
            return
        known = error if isinstance(error, HeteroError) else InternalError(f"{self._replica}: {error!r}")
        self._error, self._state = known, ReplicaState.FAILED
        await asyncio.to_thread(self._stop)
        self._renewal.cancel()
        await self._renew()

    async def _renew_forever(self) -> None:
        noted_at = time.monotonic()
        while True:
            await self._renew()
            await asyncio.sleep(LEASE_PERIOD_S)
            if time.monotonic() - noted_at > SHM_NOTE_PERIOD_S and self._state is ReplicaState.STARTING:
                await asyncio.to_thread(self._note_leftovers)
                noted_at = time.monotonic()

    async def _renew(self) -> None:
        try:
            await self._scheduler.renew.remote(to_data(self._status()), ray.get_runtime_context().get_actor_id())
        except ray.exceptions.RayActorError:
            # The scheduler restarts by itself and its handle stays good; the next renewal reaches it.
            return

    async def _watch_engine(self) -> None:
        engine = self._engine
        assert engine is not None
        await asyncio.to_thread(engine.wait)
        if self._stopping.is_set():
            return
        await self._fail(await asyncio.to_thread(engine.failure))
        # Serve replaces a dead actor at once, an unhealthy one only after three failed checks.
        os._exit(1)

    def _status(self) -> ReplicaStatus:
        spec, engine = self._spec, self._engine
        starting = self._state is ReplicaState.STARTING
        ready = self._state is ReplicaState.READY
        return ReplicaStatus(
            replica=self._replica,
            model=spec.model,
            app=spec.app,
            kind=spec.kind,
            accelerator=spec.accelerator,
            node=self._node.node,
            state=self._state,
            tp=spec.tp,
            pp=spec.pp,
            devices=tuple(device.uid for device in self._devices),
            cores=tuple(core for device in self._devices for core in device.cores),
            endpoint="{}:{}".format(*self._endpoint) if ready and self._endpoint else None,
            phase=(engine.phase if engine else self._launched_phase) if starting else None,
            phase_since_s=time.monotonic() - engine.phase_since if starting and engine else None,
            started_unix_s=self._started_unix_s,
            ready_after_s=self._ready_after_s,
            max_model_len=spec.max_model_len,
            kv_tokens=engine.facts.get("kv_tokens") if engine else None,
            simulated=any(device.simulated for device in self._devices),
            engine_pid=engine.pid if engine else None,
            actor_pid=os.getpid(),
            log=str(engine.log_path) if engine else None,
            error=to_data(self._error.report) if self._error else None,
        )


def _assigned_devices(backend: Backend, devices: Sequence[Device], count: int) -> tuple[Device, ...]:
    """Return the devices Ray assigned, ascending: Ray may say ``6,4``, which some vendors' runtimes do not accept."""
    assert backend.native_resource is not None
    ids = ray.get_runtime_context().get_accelerator_ids().get(backend.native_resource, [])
    by_id = {name: device for device in devices for name in (str(device.index), device.uid)}
    missing = [name for name in ids if name not in by_id]
    if missing or len(ids) != count:
        raise DeviceBusy(
            f"Ray assigned {backend.native_resource} {','.join(ids) or 'none'}, the node has "
            f"{','.join(str(device.index) for device in devices)} and needs {count}",
            next=("hetero-llm devices", "hetero-llm status"),
        )
    return tuple(sorted((by_id[name] for name in ids), key=lambda device: device.index))


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _log_path(replica: str) -> Path:
    return state_dir() / "logs" / f"{replica}.log"
