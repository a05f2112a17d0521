"""The scheduler actor: keeps the registry, answers gateways and people, survives its own restart.

It holds nothing that cannot come back: models and replicas are written to Ray's key-value store at each change, nodes
publish themselves there, replicas renew their lease twice a second, gateways keep their last table while it is away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec
import ray

from hetero_llm.cluster.names import LEASE_LATE_S, LEASE_PERIOD_S, NAMESPACE, ON_HEAD, SCHEDULER
from hetero_llm.cluster.nodes import published_nodes
from hetero_llm.cluster.pools import ConfiguredModel
from hetero_llm.cluster.ray_private import death_of, kv_get, kv_put
from hetero_llm.cluster.reconciler import Reconciler
from hetero_llm.cluster.registry import Registry
from hetero_llm.cluster.resident import release_startup_pages
from hetero_llm.model import ReplicaStatus, from_data

_Held = tuple[str, ReplicaStatus]
"""Actor id and last word of a replica."""

_MODELS = "models"
_REPLICAS = "replicas"

_log = logging.getLogger(__name__)


class Scheduler:
    """Registry of one cluster, as an actor. Values cross as msgspec JSON bytes: no class of ours is unpickled."""

    def __init__(self) -> None:
        """Read back what a former incarnation wrote down."""
        # Versions must grow over restarts, and the wall clock does; gateways ignore older tables.
        self._registry = Registry(first_version=int(time.time() * 1000))
        self._actor_ids: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._read_back()
        release_startup_pages()
        self._watch_task = asyncio.get_running_loop().create_task(self._watch_late_leases())
        self._reconciler = Reconciler(self._registry, self._save_model, self._notify)
        self._reconcile_task = asyncio.get_running_loop().create_task(self._reconciler.run_forever())

    async def put_model(self, model: bytes) -> None:
        """Add or change a model (`ConfiguredModel` as JSON)."""
        self._save_model(msgspec.json.decode(model, type=ConfiguredModel))

    async def models(self) -> bytes:
        """Return all models (`ConfiguredModel`s as JSON)."""
        return msgspec.json.encode(self._registry.models())

    async def apps_of(self, name: str) -> tuple[str, ...]:
        """Return the Serve applications of a model; empty when nobody configured it."""
        return next((model.apps for model in self._registry.models() if model.entry.name == name), ())

    async def leave_models(self, names: tuple[str, ...] | None = None) -> None:
        """Leave these models, by default all, as they are from now on: they are about to be deleted."""
        known = [model.entry.name for model in self._registry.models()]
        await self._reconciler.leave(known if names is None else names)

    async def remove_model(self, name: str) -> None:
        """Forget a model and its replicas."""
        self._registry.remove_model(name)
        self._models_changed()
        self._replicas_changed()

    async def inventory(self) -> bytes:
        """Return the published nodes (`Inventory` as JSON); without `held_by`."""
        return msgspec.json.encode(await asyncio.to_thread(published_nodes))

    async def renew(self, status: Mapping[str, Any], actor_id: str) -> None:
        """Take a replica's lease: its `ReplicaStatus` as builtins and its actor's id.

        An id and not a handle: unpickling a Serve actor's handle imports all of Serve, 60 MiB.
        """
        value = from_data(status, ReplicaStatus)
        before = self._registry.version
        self._registry.renew(value, time.monotonic())
        self._actor_ids[value.replica] = actor_id
        if self._registry.version != before:
            self._replicas_changed()

    async def table(self, newer_than: int, timeout_s: float) -> bytes | None:
        """Return the routing table once its version exceeds `newer_than`; None after `timeout_s` without change."""
        deadline = time.monotonic() + timeout_s
        while self._registry.version <= newer_than:
            changed = self._changed
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), max(0.0, deadline - time.monotonic()))
            if time.monotonic() >= deadline and self._registry.version <= newer_than:
                return None
        return msgspec.json.encode(self._registry.table())

    def _read_back(self) -> None:
        """Take over what a former incarnation knew.

        Replicas too: a table without one that lives must not be given out, and how long a replica takes to find the
        restarted actor depends on how busy the machine is. Those that died meanwhile are soon late, and Ray is asked.
        """
        models = kv_get(NAMESPACE, _MODELS)
        for model in msgspec.json.decode(models, type=tuple[ConfiguredModel, ...]) if models else ():
            self._registry.put_model(model)
        replicas = kv_get(NAMESPACE, _REPLICAS)
        for actor_id, status in msgspec.json.decode(replicas, type=tuple[_Held, ...]) if replicas else ():
            self._registry.renew(status, time.monotonic())
            self._actor_ids[status.replica] = actor_id

    def _replicas_changed(self) -> None:
        replicas = self._registry.table().replicas
        self._actor_ids = {status.replica: self._actor_ids[status.replica] for status in replicas}
        held = [(self._actor_ids[status.replica], status) for status in replicas]
        kv_put(NAMESPACE, _REPLICAS, msgspec.json.encode(held))
        self._notify()

    def _save_model(self, model: ConfiguredModel) -> None:
        self._registry.put_model(model)
        self._models_changed()

    def _models_changed(self) -> None:
        kv_put(NAMESPACE, _MODELS, msgspec.json.encode(self._registry.models()))
        self._notify()

    def _notify(self) -> None:
        # Waiters hold the old event; each change gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()

    async def _watch_late_leases(self) -> None:
        while True:
            await asyncio.sleep(LEASE_PERIOD_S)
            try:
                await self._ask_about_late_leases()
            except Exception:  # noqa: BLE001  one failed question, whatever it was, must not be the last
                _log.exception("late leases could not be looked into")

    async def _ask_about_late_leases(self) -> None:
        for replica in self._registry.late(time.monotonic(), LEASE_LATE_S):
            actor_id = self._actor_ids.get(replica)  # None: it was forgotten while another one was asked about
            if actor_id and (cause := await asyncio.to_thread(death_of, actor_id)):
                self._registry.died(replica, cause)
                self._replicas_changed()


def start_scheduler() -> Any:
    """Return the cluster's scheduler, started if there is none. It outlives the caller and restarts by itself."""
    return (
        ray.remote(Scheduler)
        .options(
            name=SCHEDULER,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            # On the head, without which there is no cluster: a node that is lost must not take the scheduler along.
            resources=ON_HEAD,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=1000,
        )
        .remote()
    )


def find_scheduler() -> Any:
    """Return the cluster's scheduler.

    Raises:
        ValueError: this cluster has none (it was not started by hetero-llm).
    """
    return ray.get_actor(SCHEDULER, namespace=NAMESPACE)
