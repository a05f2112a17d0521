"""Keeps models at what was asked for when nodes come and go. The decisions are `hetero_llm.scheduler.reconcile`'s.

Runs inside the scheduler actor. What it decides is written down first and asked of Serve afterwards, by a task in a
process of its own: the actor stays small, and a restart in between does the rest again, which changes nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import msgspec
import ray

from hetero_llm.cluster.nodes import published_nodes, with_holders
from hetero_llm.cluster.pools import ConfiguredModel, changed, closed, pools_now, tried_again
from hetero_llm.cluster.ray_private import draining_nodes, kv_delete, kv_get, kv_put
from hetero_llm.cluster.registry import Registry
from hetero_llm.matrix import load_matrix
from hetero_llm.model import NodeInventory, ReplicaState
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.backoff import Backoff
from hetero_llm.scheduler.reconcile import Change, Pool, Situation, next_change, places_lacking
from hetero_llm.scheduler.rules import rules_of

PERIOD_S = 1.0
"""How often every model is looked at."""

ROUNDS = 3
"""A change is made when it was found in this many rounds: a replica on its way looks lost for a moment."""

_NAMESPACE = "hetero-llm-reconciler"
_UNFINISHED = "unfinished"

_log = logging.getLogger(__name__)


class Reconciler:
    """Looks at all models once a second and changes at most one at a time."""

    def __init__(self, registry: Registry, save: Callable[[ConfiguredModel], None], notify: Callable[[], None]):
        """Work on `registry`; `save` writes a changed model down, `notify` tells that the table has changed."""
        self._registry = registry
        self._save = save
        self._notify = notify
        self._rules = {backend.kind: rules_of(backend) for backend in load_plugins().backends()}
        self._found: dict[str, tuple[Change, int]] = {}
        self._backoff = Backoff()
        self._changing = asyncio.Lock()

    async def run_forever(self) -> None:
        """Finish what a former incarnation began, then keep looking. What fails is tried again."""
        while True:
            try:
                if kv_get(_NAMESPACE, _UNFINISHED) is not None:
                    await self._ask_serve(self._registry.models())
                await self.look()
            except Exception:  # noqa: BLE001  one failed round, whatever it was, must not be the last
                _log.exception("a round of the reconciler failed")
            await asyncio.sleep(PERIOD_S)

    async def leave(self, names: Sequence[str]) -> None:
        """Change nothing about these models any more; returns when no change of one is under way."""
        async with self._changing:
            for model in self._registry.models():
                if model.entry.name in names:
                    self._save(replace(model, deployment=None))
                    for app in model.apps:
                        self._backoff.well(app)

    async def look(self) -> None:
        """Look once at every model that can change."""
        if not any(model.deployment is not None for model in self._registry.models()):
            return
        nodes, leaving = await asyncio.to_thread(_nodes_now)
        for name in [model.entry.name for model in self._registry.models()]:
            async with self._changing:
                await self._look_at(name, with_holders(nodes, self._registry.table().replicas), leaving)

    async def _look_at(self, name: str, nodes: Sequence[NodeInventory], leaving: Collection[str]) -> None:
        # Read anew each time: while another model was changed this one may have been stopped.
        models = {model.entry.name: model for model in self._registry.models()}
        model, replicas = models.get(name), self._registry.table().replicas
        if model is None or model.deployment is None:
            return
        pools = pools_now(model, replicas, nodes, leaving)
        rest = [other for other in models.values() if other is not model]
        others = [pool for other in rest for pool in pools_now(other, replicas, nodes, leaving)]
        situation = Situation(
            facts=model.deployment.plan.model,
            wishes=model.deployment.wishes,
            pools=pools,
            nodes=nodes,
            rules=self._rules,
            matrix=load_matrix(),
            others=others,
        )
        change = await asyncio.to_thread(next_change, situation)
        errors = self._failing(pools, nodes)
        self._note(name, pools, nodes, errors)
        if change is None:
            self._found.pop(name, None)
            if due := {app for app in errors if self._backoff.due(app)}:
                await self._try_again(model, due)
            return
        before, rounds = self._found.get(name, (None, 0))
        rounds = rounds + 1 if before == change else 1
        self._found[name] = (change, rounds)
        if rounds >= ROUNDS:
            del self._found[name]
            _log.info("%s: %s", name, change.reason)
            after = changed(model, change)
            self._save(after)
            await self._ask_serve((after,))

    async def _ask_serve(self, models: Sequence[ConfiguredModel]) -> None:
        kv_put(_NAMESPACE, _UNFINISHED, b"1")
        task = ray.remote(_run_pools).options(num_cpus=0)
        await asyncio.wrap_future(task.remote(msgspec.json.encode(models)).future())
        kv_delete(_NAMESPACE, _UNFINISHED)

    async def _try_again(self, model: ConfiguredModel, apps: Collection[str]) -> None:
        for app in apps:
            _log.info("%s is tried again", app)
            self._backoff.tried_again(app)
        after = tried_again(model, apps)
        self._save(after)
        await self._ask_serve((after,))

    def _failing(self, pools: Sequence[Pool], nodes: Sequence[NodeInventory]) -> dict[str, str]:
        """Return application to what its replicas died of, for those that nobody starts although there is a place."""
        died = {
            status.app: str(status.error["message"])
            for status in self._registry.table().replicas
            if status.state is ReplicaState.FAILED and status.error is not None
        }
        lacking = places_lacking(pools, nodes)
        errors = {}
        for pool in pools:
            if pool.ready >= pool.wanted:
                self._backoff.well(pool.app)
            elif pool.missing == 0 or pool.app in lacking:
                self._backoff.trying(pool.app)
            elif pool.app in died:
                errors[pool.app] = died[pool.app]
        return errors

    def _note(
        self, name: str, pools: Sequence[Pool], nodes: Sequence[NodeInventory], errors: Mapping[str, str]
    ) -> None:
        accelerators = {pool.app: pool.accelerator for pool in pools}
        lacking = places_lacking(pools, nodes)
        texts = [f"{count} of {app}: no free {accelerators[app]} on a living node" for app, count in lacking.items()]
        for app, error in errors.items():
            if (pause_s := self._backoff.failing(app)) is not None:
                texts.append(f"{app} failed: {error}; it is tried again after {pause_s:.0f} s")
        if self._registry.note(name, "; ".join(texts) or None):
            self._notify()


def _nodes_now() -> tuple[tuple[NodeInventory, ...], frozenset[str]]:
    """Return the published nodes, and the names of those that are told to leave."""
    told = draining_nodes()
    nodes = published_nodes().nodes
    leaving = frozenset(node.node for node in nodes if node.ray_node_id in told)
    return closed(nodes, leaving), leaving


def _run_pools(models: bytes) -> None:
    # Here, not above: the scheduler actor imports this module and has no use for Serve, which takes 60 MB.
    from hetero_llm.cluster.applications import run_pools

    for model in msgspec.json.decode(models, type=tuple[ConfiguredModel, ...]):
        run_pools(model.pools)
