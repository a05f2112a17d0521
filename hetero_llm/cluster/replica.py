"""EngineReplica: the actor that holds a replica's devices and runs its engine. The same for every kind.

A Serve deployment, so Ray keeps the wanted number alive. The actor stays light: no torch, no vllm. Requests do not pass
through it; the gateway talks to the engine directly.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from hetero_llm.cluster.controller import find_scheduler
from hetero_llm.cluster.engine_process import EngineProcess
from hetero_llm.cluster.group import excused, run_ranks
from hetero_llm.cluster.group_verdict import Ending, judge
from hetero_llm.cluster.names import LEASE_PERIOD_S
from hetero_llm.cluster.rank_host import Followers
from hetero_llm.cluster.ray_private import bind_serve_rpc
from hetero_llm.cluster.replica_spec import Member, ReplicaSpec
from hetero_llm.cluster.resident import release_startup_pages
from hetero_llm.cluster.share import EngineShare, free_port, preflight_hints
from hetero_llm.errors import EngineNotReady, HeteroError, InternalError, NoReadyReplica
from hetero_llm.model import ReplicaState, ReplicaStatus, from_data, to_data
from hetero_llm.plugin.manager import PluginManager, load_plugins

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
        self._ray_node_id = ray.get_runtime_context().get_node_id()
        self._stopping = threading.Event()
        self._cancelled = threading.Event()
        self._bandwidth: float | None = None
        self._share = EngineShare(self._spec, self._replica)
        self._followers = Followers(self._spec, self._replica)
        self._follower_cause: HeteroError | None = None
        self._members: tuple[Member, ...] = ()
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
        if self._share.engine is None or self._state is not ReplicaState.READY:
            raise NoReadyReplica(f"{self._replica} is {self._state.value}", next=("hetero-llm status",))
        return await asyncio.to_thread(self._share.engine.complete, body)

    async def health(self) -> str:
        """Return the replica's state, a `ReplicaState` value."""
        return self._state.value

    async def drain(self) -> None:
        """Leave the routing table and return when what is being answered is finished."""
        self._state = ReplicaState.DRAINING
        await self._renew()
        if self._share.engine is not None:
            await asyncio.to_thread(self._drain, self._share.engine)

    async def stop(self) -> None:
        """Drain, then end the actor and its engine. Serve starts another one unless it wants fewer now."""
        await self.drain()
        await asyncio.to_thread(self._stop)
        os._exit(0)

    async def check_health(self) -> None:
        """Serve's health check. Light on purpose: a busy engine is healthy, a dead one has ended the actor already."""
        engine = self._share.engine
        if engine is not None and engine.exit_code() is not None:
            raise engine.failure()

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
        own = self._share.take_devices(plugins)
        self._members = (own, *self._followers.take_devices())
        self._check_group(plugins)
        self._go_on_to("starting")
        port = free_port(own.address)
        master_port = free_port(own.address) if spec.nodes > 1 else None
        self._endpoint = (own.address, port)
        engines = [spec.engine(self._members, node, port, master_port) for node in range(spec.nodes)]
        engine = self._share.launch(engines[0], plugins)
        self._followers.launch(engines[1:])
        threading.Thread(target=self._end_with_followers, args=(engine,), daemon=True).start()
        engine.wait_ready(self._stopping)
        self._share.note_leftovers()

    def _check_group(self, plugins: PluginManager) -> None:
        group = self._spec.group(self._members, master_port=free_port(self._members[0].address))
        setup = plugins.backend(self._spec.kind).group(group)
        if len(group.ranks) == 1 or excused(setup, group):
            return
        self._go_on_to("checking the group")
        others = self._followers.start_check(group, self._members)
        threading.Thread(target=self._cancel_with_followers, args=(others,), daemon=True).start()
        own = run_ranks(
            setup,
            group,
            node=self._members[0].node,
            hints=preflight_hints(self._spec, self._members, plugins),
            cancelled=self._cancelled,
        )
        if any(outcome.ending is not Ending.PASSED for outcome in own):
            self._followers.cancel_check()
        report = judge(setup, group, (*own, *self._followers.outcomes(others)))
        self._bandwidth = report.bandwidth_bytes_per_s

    def _cancel_with_followers(self, checks: Sequence[Any]) -> None:
        """A rank that failed on a further node is waited for in vain here."""
        if self._followers.first_failed(checks):
            self._cancelled.set()

    def _end_with_followers(self, engine: EngineProcess) -> None:
        """A rank that ends takes the whole group along; what it died of is the root cause."""
        cause = self._followers.first_end()
        if cause is not None and engine.exit_code() is None and not self._stopping.is_set():
            self._follower_cause = cause
            engine.stop()

    def _go_on_to(self, phase: str) -> None:
        if self._stopping.is_set():
            raise EngineNotReady(f"{self._replica} was stopped while it was {self._launched_phase}")
        self._launched_phase = phase

    def _drain(self, engine: EngineProcess) -> None:
        # Gateways learn of the new table within milliseconds; what they sent before that must have arrived.
        time.sleep(TABLE_DELAY_S)
        deadline = time.monotonic() + DRAIN_S
        while engine.exit_code() is None and engine.requests_in_flight() and time.monotonic() < deadline:
            time.sleep(0.2)

    def _stop(self) -> None:
        self._stopping.set()
        self._cancelled.set()
        self._share.stop()
        self._followers.stop()

    # -- what the scheduler is told ------------------------------------------------------------------------------------

    async def _fail(self, error: Exception) -> None:
        if self._stopping.is_set():
            # __del__ is at work and what failed is the start it interrupted; it may have come before the engine did.
            await asyncio.to_thread(self._stop)
            return
        known = error if isinstance(error, HeteroError) else InternalError(f"{self._replica}: {error!r}")
        self._error, self._state = self._follower_cause or known, ReplicaState.FAILED
        await asyncio.to_thread(self._stop)
        self._renewal.cancel()
        await self._renew()

    async def _renew_forever(self) -> None:
        noted_at = time.monotonic()
        while True:
            await self._renew()
            await asyncio.sleep(LEASE_PERIOD_S)
            if time.monotonic() - noted_at > SHM_NOTE_PERIOD_S and self._state is ReplicaState.STARTING:
                await asyncio.to_thread(self._share.note_leftovers)
                noted_at = time.monotonic()

    async def _renew(self) -> None:
        try:
            await self._scheduler.renew.remote(to_data(self._status()), ray.get_runtime_context().get_actor_id())
        except ray.exceptions.RayError:
            # The scheduler restarts by itself and its handle stays good; the next renewal reaches it.
            return

    async def _watch_engine(self) -> None:
        engine = self._share.engine
        assert engine is not None
        await asyncio.to_thread(engine.wait)
        if self._stopping.is_set():
            return
        await self._fail(await asyncio.to_thread(engine.failure))
        # Serve replaces a dead actor at once, an unhealthy one only after three failed checks.
        os._exit(1)

    def _status(self) -> ReplicaStatus:
        spec, engine = self._spec, self._share.engine
        devices = tuple(device for member in self._members for device in member.devices)
        starting = self._state is ReplicaState.STARTING
        ready = self._state is ReplicaState.READY
        return ReplicaStatus(
            replica=self._replica,
            model=spec.model,
            app=spec.app,
            kind=spec.kind,
            accelerator=spec.accelerator,
            node=self._members[0].node if self._members else self._ray_node_id,
            state=self._state,
            tp=spec.tp,
            pp=spec.pp,
            devices=tuple(device.uid for device in devices),
            cores=tuple(core for device in devices for core in device.cores),
            endpoint="{}:{}".format(*self._endpoint) if ready and self._endpoint else None,
            phase=(engine.phase if engine else self._launched_phase) if starting else None,
            phase_since_s=time.monotonic() - engine.phase_since if starting and engine else None,
            started_unix_s=self._started_unix_s,
            ready_after_s=self._ready_after_s,
            max_model_len=spec.max_model_len,
            kv_tokens=engine.facts.get("kv_tokens") if engine else None,
            group_bandwidth_bytes_per_s=self._bandwidth,
            simulated=any(device.simulated for device in devices),
            engine_pid=engine.pid if engine else None,
            actor_pid=os.getpid(),
            log=str(engine.log_path) if engine else None,
            error=to_data(self._error.report) if self._error else None,
        )
