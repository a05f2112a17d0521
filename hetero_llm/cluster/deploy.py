"""Plans become Serve applications: one per (model, kind, accelerator, tp, pp); the gateway is one more."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray import serve

from hetero_llm.cluster.registry import ConfiguredModel
from hetero_llm.cluster.replica import DRAIN_S, EngineReplica
from hetero_llm.cluster.replica_spec import ReplicaSpec
from hetero_llm.cluster.session import Session, quiet_ray
from hetero_llm.errors import UnknownReplica
from hetero_llm.model import (
    ModelEntry,
    Plan,
    ReplicaPlan,
    ReplicaStatus,
    RoutingTable,
    to_data,
)
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.resources import replica_resources

STOP_DEADLINE_S = DRAIN_S + 30.0
"""Serve kills a replica that takes longer to leave: drain, then end the engine's processes."""

START_ATTEMPTS = 3
"""How often Serve starts a replica that has never been ready before it gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDeployment:
    """A plan to carry out.

    Attributes:
        name: name clients use.
        source: what the user wrote.
        path: model folder, the same on every node of the plan.
        engine_args: engine flags of the user, appended last.
        engine_options: kind → settings for that backend.
        start_deadline_s: seconds a replica may take to its first token.
    """

    name: str
    source: str
    path: Path
    plan: Plan
    engine_args: tuple[str, ...] = ()
    engine_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    gpu_memory_utilization: float = 0.9
    start_deadline_s: float = 600.0


def deploy_model(session: Session, deployment: ModelDeployment) -> None:
    """Ask Ray for the replicas of a plan and return at once; `snapshot` shows how they come up."""
    plan = deployment.plan
    replicas = sorted(plan.replicas, key=_pool_key)
    entry = ModelEntry(
        name=deployment.name,
        source=deployment.source,
        created_unix_s=int(time.time()),
        kinds=tuple(sorted({replica.kind for replica in replicas})),
        max_model_len=min((replica.max_model_len for replica in replicas), default=None),
    )
    plugins = load_plugins()
    targets = []
    for _, pool in groupby(replicas, key=_pool_key):
        members = tuple(pool)
        native = plugins.backend(members[0].kind).native_resource
        spec = _replica_spec(deployment, members)
        targets.append(_application(spec, len(members), native))
    model = ConfiguredModel(entry=entry, apps=tuple(target.name for target in targets))
    ray.get(session.scheduler.put_model.remote(msgspec.json.encode(model)))
    start_serve()
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def start_serve() -> None:
    """Start Ray Serve without its proxies; nothing happens when it runs already."""
    quiet_ray()
    serve.start(proxy_location="Disabled")


def snapshot(session: Session) -> RoutingTable:
    """Return all models and replicas as they are now."""
    return newer_snapshot(session, newer_than=-1, timeout_s=30.0) or RoutingTable(version=0)


def newer_snapshot(session: Session, newer_than: int, timeout_s: float) -> RoutingTable | None:
    """Return the next table whose version exceeds `newer_than`; None when nothing changed for `timeout_s`."""
    table = ray.get(session.scheduler.table.remote(newer_than, timeout_s))
    return None if table is None else msgspec.json.decode(table, type=RoutingTable)


def delete_model(session: Session, name: str) -> None:
    """Stop a model: its replicas finish what they answer and end. Returns when they are gone."""
    quiet_ray()
    for app in ray.get(session.scheduler.apps_of.remote(name)):
        serve.delete(app)
    ray.get(session.scheduler.remove_model.remote(name))


def replica_log(session: Session, replica_prefix: str, tail_lines: int | None) -> Iterator[str]:
    """Yield the lines of a replica's engine log, the last `tail_lines` of them or all.

    Raises:
        UnknownReplica: no replica, or more than one, has an id that starts with `replica_prefix`.
    """
    status = find_replica(session, replica_prefix)
    if status.log is None:
        return
    with Path(status.log).open(encoding="utf-8", errors="replace") as log:
        yield from log if tail_lines is None else deque(log, maxlen=tail_lines)


def find_replica(session: Session, replica_prefix: str) -> ReplicaStatus:
    """Return the one replica whose id starts with `replica_prefix`; raises UnknownReplica otherwise."""
    replicas = snapshot(session).replicas
    found = [status for status in replicas if status.replica.startswith(replica_prefix)]
    if len(found) == 1:
        return found[0]
    known = tuple(f"hetero-llm logs {status.replica}" for status in found or replicas)
    what = "no replica's id starts" if not found else f"{len(found)} replicas' ids start"
    raise UnknownReplica(f"{what} with {replica_prefix!r}", next=known or ("hetero-llm status",))


def app_name(model: str, kind: str, accelerator: str, tp: int, pp: int, nodes: int = 1) -> str:
    """Return the Serve application's name of a pool entry: URL-safe and readable."""
    shape = f"tp{tp}" + (f"-pp{pp}" if pp > 1 else "") + (f"-n{nodes}" if nodes > 1 else "")
    return re.sub(r"[^A-Za-z0-9_.-]", "-", f"{model}-{kind}-{accelerator}-{shape}")


def _pool_key(replica: ReplicaPlan) -> tuple[str, str, int, int, int, int]:
    shape = (replica.tp, replica.pp, len(replica.placement))
    return (replica.kind, replica.accelerator, *shape, replica.max_model_len)


def _replica_spec(deployment: ModelDeployment, members: tuple[ReplicaPlan, ...]) -> ReplicaSpec:
    first = members[0]
    return ReplicaSpec(
        app=app_name(deployment.name, first.kind, first.accelerator, first.tp, first.pp, len(first.placement)),
        model=deployment.name,
        path=str(deployment.path),
        kind=first.kind,
        accelerator=first.accelerator,
        planned=tuple(uid for member in members for placement in member.placement for uid in placement.devices),
        tp=first.tp,
        pp=first.pp,
        nodes=len(first.placement),
        max_model_len=first.max_model_len,
        kv_cache_bytes=first.memory.kv_bytes,
        gpu_memory_utilization=deployment.gpu_memory_utilization,
        engine_args=deployment.engine_args,
        options=deployment.engine_options.get(first.kind, {}),
        start_deadline_s=deployment.start_deadline_s,
    )


def _application(spec: ReplicaSpec, replicas: int, native: str | None) -> serve.RunTarget:
    resources = replica_resources(spec.kind, spec.accelerator, native, spec.devices_per_node)
    # An actor's bundle of a placement group must hold what the actor asks for; the further nodes' actors ask the same.
    groups: dict[str, Any] = {}
    if spec.nodes > 1:
        bundles = [dict(resources) for _ in range(spec.nodes)]
        groups = {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": resources.pop("GPU", 0), "resources": resources}
    deployment = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        num_replicas=replicas,
        ray_actor_options=options,
        **groups,
        max_constructor_retry_count=START_ATTEMPTS,
        graceful_shutdown_timeout_s=STOP_DEADLINE_S,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        # An engine under load makes its node slow; only a dead replica is replaced.
        health_check_timeout_s=60.0,
        max_ongoing_requests=1000,
    )
    return serve.RunTarget(target=deployment.bind(to_data(spec)), name=spec.app, route_prefix=None)
