"""What the cluster remembers of a model: what was asked for, and the pools of equal replicas made from it.

One pool per (model, kind, accelerator, tp, pp, nodes); each is a Serve application. Pure: no Ray.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from hetero_llm.cluster.replica_spec import ReplicaSpec
from hetero_llm.model import ModelEntry, NodeInventory, Plan, PoolWish, ReplicaPlan, ReplicaState, ReplicaStatus
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.reconcile import Change, Pool

_LIVING = (ReplicaState.STARTING, ReplicaState.READY, ReplicaState.DRAINING)
"""A draining replica too: where Serve wants fewer, fewer are wanted; what moves has its successor soon."""

_LEAVING = "its node is told to leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeployment:
    """A plan to carry out.

    Attributes:
        name: name clients use.
        source: what the user wrote.
        path: model folder, the same on every node of the plan.
        wishes: what the plan was made from; a change of the cluster leads to another plan of them.
        engine_args: engine flags of the user, appended last.
        engine_options: kind → settings for that backend.
        start_deadline_s: seconds a replica may take to its first token.
    """

    name: str
    source: str
    path: str
    plan: Plan
    wishes: tuple[PoolWish, ...] = ()
    engine_args: tuple[str, ...] = ()
    engine_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gpu_memory_utilization: float = 0.9
    start_deadline_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredPool:
    """One Serve application.

    Attributes:
        replicas: how many Serve is asked for.
        native: Ray resource that hands out the kind's device ids; None where devices are leased.
        retries: how often Serve was told to try again after it had given up.
    """

    spec: ReplicaSpec
    replicas: int
    native: str | None
    retries: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfiguredModel:
    """A model somebody asked for.

    Attributes:
        deployment: None only where nothing is ever changed by itself.
        retiring: application to the number of its replicas that end once their successors elsewhere are ready.
        successors: applications those are in; none while nothing retires.
    """

    entry: ModelEntry
    pools: tuple[ConfiguredPool, ...] = ()
    deployment: ModelDeployment | None = None
    retiring: Mapping[str, int] = field(default_factory=dict)
    successors: tuple[str, ...] = ()

    @property
    def apps(self) -> tuple[str, ...]:
        """Serve applications that hold the model's replicas."""
        return tuple(pool.spec.app for pool in self.pools)


def pools_of(deployment: ModelDeployment, replicas: Sequence[ReplicaPlan]) -> tuple[ConfiguredPool, ...]:
    """Return one pool per sort of replica in a plan.

    Raises:
        UnknownKind: no plugin here knows a kind.
    """
    plugins = load_plugins()
    pools = []
    for _, group in groupby(sorted(replicas, key=_pool_key), key=_pool_key):
        members = tuple(group)
        native = plugins.backend(members[0].kind).native_resource
        pools.append(ConfiguredPool(spec=_spec(deployment, members), replicas=len(members), native=native))
    return tuple(pools)


def changed(model: ConfiguredModel, change: Change) -> ConfiguredModel:
    """Return `model` after `change`. A pool that ends with no replica stays listed, so that Serve is told."""
    assert model.deployment is not None
    pools = {pool.spec.app: pool for pool in model.pools}
    added = pools_of(model.deployment, change.replicas)
    for more in added:
        app = more.spec.app
        if app in pools:
            planned = tuple(dict.fromkeys((*pools[app].spec.planned, *more.spec.planned)))
            spec = replace(pools[app].spec, planned=planned)
            more = replace(pools[app], spec=spec, replicas=pools[app].replicas + more.replicas)
        pools[app] = more
    for app, count in change.counts.items():
        pools[app] = replace(pools[app], replicas=count)
    kinds = {*model.entry.kinds, *(pool.spec.kind for pool in pools.values())}
    entry = replace(model.entry, kinds=tuple(sorted(kinds)))
    retiring = {app: count for app, count in {**model.retiring, **change.retiring}.items() if count > 0}
    new = tuple(more.spec.app for more in added) if change.retiring else ()
    successors = tuple(dict.fromkeys((*model.successors, *new))) if retiring else ()
    return replace(model, entry=entry, pools=tuple(pools.values()), retiring=retiring, successors=successors)


def tried_again(model: ConfiguredModel, apps: Collection[str]) -> ConfiguredModel:
    """Return `model` with one more attempt for the pools named in `apps`."""
    pools = (replace(pool, retries=pool.retries + (pool.spec.app in apps)) for pool in model.pools)
    return replace(model, pools=tuple(pools))


def pools_now(
    model: ConfiguredModel,
    replicas: Sequence[ReplicaStatus],
    nodes: Sequence[NodeInventory],
    leaving: Collection[str] = (),
) -> tuple[Pool, ...]:
    """Return the pools of `model` as they are wanted, and how many replicas of each live on living nodes.

    Args:
        leaving: names of the nodes that are told to leave.
    """
    alive = {node.node for node in nodes if node.alive}
    pools = []
    for pool in model.pools:
        spec = pool.spec
        living = [one for one in replicas if one.app == spec.app and one.state in _LIVING and one.node in alive]
        staying = [status for status in living if status.node not in leaving]
        pools.append(
            Pool(
                app=spec.app,
                kind=spec.kind,
                accelerator=spec.accelerator,
                tp=spec.tp,
                pp=spec.pp,
                nodes=spec.nodes,
                labels=spec.labels,
                wanted=pool.replicas,
                living=len(living),
                ready=sum(status.state is ReplicaState.READY for status in staying),
                leaving=len(living) - len(staying),
                retiring=model.retiring.get(spec.app, 0),
                succeeds=spec.app in model.successors,
            )
        )
    return tuple(pools)


def closed(nodes: Sequence[NodeInventory], leaving: Collection[str]) -> tuple[NodeInventory, ...]:
    """Return `nodes`, where the devices of those named in `leaving` are nobody's place any more."""
    return tuple(
        replace(node, devices=tuple(replace(device, held_by=_LEAVING) for device in node.devices))
        if node.node in leaving
        else node
        for node in nodes
    )


def app_name(replica: ReplicaPlan, model: str) -> str:
    """Return the Serve application's name of a pool entry: URL-safe and readable."""
    kind, accelerator, nodes = replica.kind, replica.accelerator, len(replica.placement)
    shape = f"tp{replica.tp}" + (f"-pp{replica.pp}" if replica.pp > 1 else "") + (f"-n{nodes}" if nodes > 1 else "")
    if replica.labels:
        shape += "-" + "-".join(value for _, value in sorted(replica.labels.items()))
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{model}-{kind}-{accelerator}-{shape}")


def _pool_key(replica: ReplicaPlan) -> tuple[object, ...]:
    shape = (replica.tp, replica.pp, len(replica.placement))
    labels = tuple(sorted(replica.labels.items()))
    return (replica.kind, replica.accelerator, *shape, replica.max_model_len, labels)


def _spec(deployment: ModelDeployment, members: tuple[ReplicaPlan, ...]) -> ReplicaSpec:
    first = members[0]
    nodes = len(first.placement)
    return ReplicaSpec(
        app=app_name(first, deployment.name),
        model=deployment.name,
        path=deployment.path,
        kind=first.kind,
        accelerator=first.accelerator,
        planned=tuple(uid for member in members for placement in member.placement for uid in placement.devices),
        tp=first.tp,
        pp=first.pp,
        nodes=nodes,
        labels=first.labels,
        max_model_len=first.max_model_len,
        # Ray chooses which of them runs where.
        kv_cache_bytes=min(member.memory.kv_bytes for member in members),
        gpu_memory_utilization=deployment.gpu_memory_utilization,
        engine_args=deployment.engine_args,
        options=deployment.engine_options.get(first.kind, {}),
        start_deadline_s=deployment.start_deadline_s,
    )
