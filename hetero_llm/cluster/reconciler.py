"""Keeps models at what was asked for when nodes come and go. The decisions are `hetero_llm.scheduler.reconcile`'s.

Runs inside the scheduler actor. What it decides is written down first and asked of Serve afterwards, by a task in a
process of its own: the actor stays small, and a restart in between does the rest again, which changes nothing twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import ray

from hetero_llm.cluster.nodes import published_nodes, with_holders
from hetero_llm.cluster.pools import ConfiguredModel, changed, pools_now
from hetero_llm.cluster.ray_private import draining_nodes, kv_delete, kv_get, kv_put
from hetero_llm.cluster.registry import Registry
from hetero_llm.matrix import load_matrix
from hetero_llm.model import NodeInventory
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.reconcile import Change, Pool, next_change, places_lacking
from hetero_llm.scheduler.rules import rules_of

PERIOD_S = 1.0
"""How often every model is looked at."""

ROUNDS = 3
"""A change is made when it was found in this many rounds: a replica on its way looks lost for a moment."""

_NAMESPACE = "hetero-llm-reconciler"
_UNFINISHED = "unfinished"
_LEAVING = "its node is told to leave"

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

    async def look(self) -> None:
        """Look once at every model that can change."""
        if not any(model.deployment is not None for model in self._registry.models()):
            return
        nodes = await asyncio.to_thread(_nodes_now)
        for name in [model.entry.name for model in self._registry.models()]:
            async with self._changing:
                await self._look_at(name, with_holders(nodes, self._registry.table().replicas))

    async def _look_at(self, name: str, nodes: Sequence[NodeInventory]) -> None:
        # Read anew each time: while another model was changed this one may have been stopped.
        models = {model.entry.name: model for model in self._registry.models()}
        model, replicas = models.get(name), self._registry.table().replicas
        if model is None or model.deployment is None:
            return
        pools = pools_now(model, replicas, nodes)
        others = [pool for other in models.values() if other is not model for pool in pools_now(other, replicas, nodes)]
        facts, wishes = model.deployment.plan.model, model.deployment.wishes
        change = await asyncio.to_thread(
            next_change, facts, wishes, pools, nodes, self._rules, load_matrix(), others=others
        )
        self._note(name, pools, nodes)
        if change is None:
            self._found.pop(name, None)
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

    def _note(self, name: str, pools: Sequence[Pool], nodes: Sequence[NodeInventory]) -> None:
        accelerators = {pool.app: pool.accelerator for pool in pools}
        lacking = places_lacking(pools, nodes)
        texts = [f"{count} of {app}: no free {accelerators[app]} on a living node" for app, count in lacking.items()]
        if self._registry.note(name, "; ".join(texts) or None):
            self._notify()


def _nodes_now() -> tuple[NodeInventory, ...]:
    """Return the published nodes; devices of a node that is told to leave are nobody's place any more."""
    leaving = draining_nodes()
    return tuple(
        replace(node, devices=tuple(replace(device, held_by=_LEAVING) for device in node.devices))
        if node.ray_node_id in leaving
        else node
        for node in published_nodes().nodes
    )


def _run_pools(models: bytes) -> None:
    # Here, not above: the scheduler actor imports this module and has no use for Serve, which takes 60 MB.
    from hetero_llm.cluster.applications import run_pools

    for model in msgspec.json.decode(models, type=tuple[ConfiguredModel, ...]):
        run_pools(model.pools)
