"""Pools as Serve applications, one each.

Changing the number of replicas restarts none of them: an application's version says what its replicas are started from,
and Serve replaces replicas only when that changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ray import serve

from hetero_llm.cluster.pools import ConfiguredPool
from hetero_llm.cluster.ray_private import with_version
from hetero_llm.cluster.replica import DRAIN_S, EngineReplica
from hetero_llm.cluster.replica_spec import ReplicaSpec
from hetero_llm.cluster.session import quiet_ray
from hetero_llm.model import to_data
from hetero_llm.scheduler.resources import replica_resources

STOP_DEADLINE_S = DRAIN_S + 30.0
"""Serve kills a replica that takes longer to leave: drain, then end the engine's processes."""

START_ATTEMPTS = 3
"""How often Serve starts a replica that has never been ready before it gives up."""


def start_serve() -> None:
    """Start Ray Serve without its proxies; nothing happens when it runs already."""
    quiet_ray()
    serve.start(proxy_location="Disabled")


def run_pools(pools: Sequence[ConfiguredPool]) -> None:
    """Ask Serve for the replicas of `pools` and return at once. Replicas that are there already stay as they are.

    A pool without replicas has no application: Serve knows no application of none.
    """
    start_serve()
    wanted = [_application(pool) for pool in pools if pool.replicas > 0]
    if wanted:
        serve.run_many(wanted, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
    running = serve.status().applications
    for pool in pools:
        if pool.replicas == 0 and pool.spec.app in running:
            serve.delete(pool.spec.app, _blocking=False)


def _application(pool: ConfiguredPool) -> serve.RunTarget:
    spec = pool.spec
    resources = replica_resources(spec.kind, spec.accelerator, pool.native, spec.devices_per_node)
    groups: dict[str, Any] = {}
    if spec.nodes > 1:
        # The further nodes' actors ask the same as the replica, which sits in the first bundle.
        bundles = [dict(resources) for _ in range(spec.nodes)]
        groups = {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": resources.pop("GPU", 0), "resources": resources}
    deployment = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        num_replicas=pool.replicas,
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
    bound = with_version(deployment, _version(spec)).bind(to_data(spec))
    return serve.RunTarget(target=bound, name=spec.app, route_prefix=None)


def _version(spec: ReplicaSpec) -> str:
    """Return what stays the same while replicas need not be started anew: which devices were planned is only advice."""
    content = msgspec.json.encode(replace(spec, planned=()), order="sorted")
    return hashlib.blake2b(content, digest_size=8).hexdigest()
