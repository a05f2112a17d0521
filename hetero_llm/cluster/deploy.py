"""What people and the command line do with models: deploy, look at, delete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hetero_llm.cluster.applications import end_applications, run_pools
from hetero_llm.cluster.pools import ConfiguredModel, ModelDeployment, pools_of
from hetero_llm.cluster.session import Session, quiet_ray
from hetero_llm.errors import UnknownReplica
from hetero_llm.model import ModelEntry, ReplicaStatus, RoutingTable


def deploy_model(session: Session, deployment: ModelDeployment) -> None:
    """Ask Ray for the replicas of a plan and return at once; `snapshot` shows how they come up."""
    replicas = deployment.plan.replicas
    entry = ModelEntry(
        name=deployment.name,
        source=deployment.source,
        created_unix_s=int(time.time()),
        kinds=tuple(sorted({replica.kind for replica in replicas})),
        max_model_len=min((replica.max_model_len for replica in replicas), default=None),
    )
    model = ConfiguredModel(entry=entry, pools=pools_of(deployment, replicas), deployment=deployment)
    session.ask("put_model", msgspec.json.encode(model))
    run_pools(model.pools)


def snapshot(session: Session) -> RoutingTable:
    """Return all models and replicas as they are now."""
    return newer_snapshot(session, newer_than=-1, timeout_s=30.0) or RoutingTable(version=0)


def newer_snapshot(session: Session, newer_than: int, timeout_s: float) -> RoutingTable | None:
    """Return the next table whose version exceeds `newer_than`; None when nothing changed for `timeout_s`."""
    table = session.ask("table", newer_than, timeout_s, wait_s=timeout_s)
    return None if table is None else msgspec.json.decode(table, type=RoutingTable)


def delete_model(session: Session, name: str) -> None:
    """Stop a model: its replicas finish what they answer and end. Returns when they are gone."""
    quiet_ray()
    # First: replicas that leave must not be taken for lost ones and be placed elsewhere.
    session.ask("leave_models", (name,))
    end_applications(session.ask("apps_of", name))
    session.ask("remove_model", name)


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
