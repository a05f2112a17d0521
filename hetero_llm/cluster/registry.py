"""What the scheduler knows of models and replicas. Pure: no Ray, no clock of its own.

The state may be lost at any time: models are written down by the caller, replicas come back with their next lease.
A late lease never removes a replica; only the word that its actor is dead does. Everybody late at once, as under heavy
load, therefore removes nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hetero_llm.cluster.pools import ConfiguredModel
from hetero_llm.errors import ReplicaLost
from hetero_llm.model import ModelEntry, ReplicaState, ReplicaStatus, RoutingTable, Target

FAILURES_KEPT = 4
"""Ended replicas remembered per application, so that `status` can say why the last ones failed."""

_ROUTING_FIELDS = ("state", "endpoint", "phase", "error", "kv_tokens", "engine_pid")


class Registry:
    """Models and replicas, and the routing table made from them."""

    def __init__(self, first_version: int):
        """Start empty. `first_version` must exceed every version a former registry gave out."""
        self._version = first_version
        self._models: dict[str, ConfiguredModel] = {}
        self._replicas: dict[str, ReplicaStatus] = {}
        self._renewed_at: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}
        self._notes: dict[str, str] = {}

    @property
    def version(self) -> int:
        """Version of the present table; grows with every change a gateway or a person would notice."""
        return self._version

    def put_model(self, model: ConfiguredModel) -> None:
        """Add a model, or change its entry."""
        if self._models.get(model.entry.name) != model:
            self._models[model.entry.name] = model
            self._version += 1

    def remove_model(self, name: str) -> None:
        """Forget a model and its replicas."""
        if self._models.pop(name, None) is not None:
            self._version += 1
        self._notes.pop(name, None)
        for replica in [r.replica for r in self._replicas.values() if r.model == name]:
            self._forget(replica)

    def note(self, name: str, text: str | None) -> bool:
        """Keep what people should know about a model, None for nothing; return whether that is new."""
        if self._notes.get(name) == text:
            return False
        self._notes.pop(name, None)
        if text is not None:
            self._notes[name] = text
        self._version += 1
        return True

    def models(self) -> tuple[ConfiguredModel, ...]:
        """Return all models by name."""
        return tuple(self._models[name] for name in sorted(self._models))

    def renew(self, status: ReplicaStatus, now: float) -> None:
        """Take a replica's word about itself. `now` is the monotonic time in seconds.

        One whose actor was declared dead is not heard any more: its node may be back for a moment, and ends it then.
        """
        before = self._replicas.get(status.replica)
        if before is not None and before.error is not None and before.error["code"] == ReplicaLost.code:
            return
        self._replicas[status.replica] = status
        self._renewed_at[status.replica] = now
        self._seen_at.setdefault(status.replica, now)
        if before is None or any(getattr(before, name) != getattr(status, name) for name in _ROUTING_FIELDS):
            self._version += 1
        if status.state is ReplicaState.STOPPED:
            self._forget(status.replica)
        if status.state is ReplicaState.FAILED:
            self._forget_old_failures(status.app)
        if status.state is ReplicaState.READY and before is not None and before.state is not ReplicaState.READY:
            self._forget_failures(status.app)

    def late(self, now: float, age_s: float) -> tuple[str, ...]:
        """Return live replicas whose lease is older than `age_s`."""
        return tuple(
            replica
            for replica, status in self._replicas.items()
            if status.state is not ReplicaState.FAILED and now - self._renewed_at[replica] > age_s
        )

    def died(self, replica: str, cause: str) -> None:
        """Record that a replica's actor is dead."""
        status = self._replicas.get(replica)
        if status is None or status.state is ReplicaState.FAILED:
            return
        if status.state is ReplicaState.DRAINING or self._has_ready_successor(status):
            self._forget(replica)
            return
        report = {
            "code": ReplicaLost.code,
            "message": f"replica {replica} ended unexpectedly",
            "cause": cause,
            "next": [],
        }
        self._replicas[replica] = replace(status, state=ReplicaState.FAILED, error=report, endpoint=None)
        self._version += 1
        self._forget_old_failures(status.app)

    def table(self) -> RoutingTable:
        """Return what gateways and people need to know."""
        replicas = tuple(sorted(self._replicas.values(), key=lambda status: (status.model, status.started_unix_s)))
        return RoutingTable(
            version=self._version,
            models=tuple(self._with_kinds(model.entry, replicas) for model in self.models()),
            targets=tuple(_target(status) for status in replicas if _routable(status)),
            replicas=replicas,
            notes=dict(self._notes),
        )

    def _with_kinds(self, entry: ModelEntry, replicas: Iterable[ReplicaStatus]) -> ModelEntry:
        kinds = {*entry.kinds, *(status.kind for status in replicas if status.model == entry.name)}
        return replace(entry, kinds=tuple(sorted(kinds)))

    def _forget(self, replica: str) -> None:
        if self._replicas.pop(replica, None) is not None:
            self._renewed_at.pop(replica, None)
            self._seen_at.pop(replica, None)
            self._version += 1

    def _failures(self, app: str) -> list[ReplicaStatus]:
        failed = [s for s in self._replicas.values() if s.app == app and s.state is ReplicaState.FAILED]
        return sorted(failed, key=lambda status: status.started_unix_s)

    def _has_ready_successor(self, dead: ReplicaStatus) -> bool:
        # Its death is noticed by a late lease; a quick successor may have been ready before that.
        return any(
            other.state is ReplicaState.READY
            and other.app == dead.app
            and self._seen_at[other.replica] > self._renewed_at[dead.replica]
            for other in self._replicas.values()
        )

    def _forget_old_failures(self, app: str) -> None:
        for status in self._failures(app)[:-FAILURES_KEPT]:
            self._forget(status.replica)

    def _forget_failures(self, app: str) -> None:
        for status in self._failures(app):
            self._forget(status.replica)


def _routable(status: ReplicaStatus) -> bool:
    return status.state is ReplicaState.READY and status.endpoint is not None


def _target(status: ReplicaStatus) -> Target:
    assert status.endpoint is not None
    host, _, port = status.endpoint.rpartition(":")
    return Target(
        replica=status.replica,
        model=status.model,
        kind=status.kind,
        accelerator=status.accelerator,
        host=host.strip("[]"),
        port=int(port),
        max_model_len=status.max_model_len,
        simulated=status.simulated,
    )
