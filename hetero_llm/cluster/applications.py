"""Pools as Serve applications, one each.

Changing the number of replicas restarts none of them: an application's version says what its replicas are started from,
and Serve replaces replicas only when that changes.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ray import serve

from hetero_llm.cluster.pools import ConfiguredPool
from hetero_llm.cluster.ray_private import kill_unplaced_replicas, with_version
from hetero_llm.cluster.replica import DRAIN_S, EngineReplica
from hetero_llm.cluster.replica_spec import ReplicaSpec
from hetero_llm.cluster.session import quiet_ray
from hetero_llm.errors import ReplicaStuck
from hetero_llm.model import to_data
from hetero_llm.scheduler.resources import label_selector, replica_resources

STOP_DEADLINE_S = DRAIN_S + 30.0
"""Serve kills a replica that takes longer to leave: drain, then end the engine's processes."""

KILL_S = 30.0
"""Time Serve takes to notice that a replica it killed is gone."""

POLL_S = 0.1

START_ATTEMPTS = 3
"""How often at least Serve starts a replica that has never been ready before it gives up."""


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
            kill_unplaced_replicas(pool.spec.app)


def end_applications(apps: Sequence[str]) -> None:
    """End applications at the same time; returns when they are gone. Not Serve's own wait, which ends after a minute.

    Raises:
        ReplicaStuck: one is still there when its replicas must have been killed.
    """
    for app in apps:
        serve.delete(app, _blocking=False)
    give_up = time.monotonic() + STOP_DEADLINE_S + KILL_S
    while left := set(apps) & set(serve.status().applications):
        if time.monotonic() > give_up:
            raise ReplicaStuck(
                f"Serve did not end {', '.join(sorted(left))} within {STOP_DEADLINE_S + KILL_S:.0f} s",
                next=("hetero-llm status", "hetero-llm logs REPLICA"),
            )
        for app in left:
            kill_unplaced_replicas(app)
        time.sleep(POLL_S)


def _application(pool: ConfiguredPool) -> serve.RunTarget:
    spec = pool.spec
    resources = replica_resources(spec.kind, spec.accelerator, pool.native, spec.devices_per_node)
    groups: dict[str, Any] = {}
    if spec.nodes > 1:
        # The further nodes' actors ask the same as the replica, which sits in the first bundle.
        bundles = [dict(resources) for _ in range(spec.nodes)]
        groups = {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
        if spec.labels:
            groups["placement_group_bundle_label_selector"] = [label_selector(spec.labels)] * spec.nodes
    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": resources.pop("GPU", 0), "resources": resources}
    if spec.labels and spec.nodes == 1:
        options["label_selector"] = label_selector(spec.labels)
    deployment = serve.deployment(
        EngineReplica,
        name="EngineReplica",
        num_replicas=pool.replicas,
        ray_actor_options=options,
        **groups,
        # Serve gives up for good unless something of the deployment is changed; this restarts no replica.
        max_constructor_retry_count=START_ATTEMPTS + pool.retries % 2,
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
