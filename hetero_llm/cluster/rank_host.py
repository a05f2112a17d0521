"""The further nodes of a group: one actor each, which holds that node's devices and runs a headless engine on them.

The replica actor leads: it starts these actors in the other bundles of its placement group, and they end with it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hetero_llm.cluster.group import run_ranks
from hetero_llm.cluster.group_verdict import Ending, RankOutcome
from hetero_llm.cluster.replica_spec import Member, ReplicaSpec
from hetero_llm.cluster.share import EngineShare, preflight_hints
from hetero_llm.errors import ErrorReport, HeteroError, ReplicaLost, from_report
from hetero_llm.model import from_data, to_data
from hetero_llm.plugin import EngineSpec, GroupSpec
from hetero_llm.plugin.manager import load_plugins

STOP_S = 15.0
"""Longest wait for a further node to end its engine."""

THREADS = 4
"""`ended` blocks for the life of the engine; `stop` must get through meanwhile."""


class RankHost:
    """The actor of one further node."""

    def __init__(self, spec: Mapping[str, Any], replica: str):
        """Hold nothing yet."""
        self._spec = from_data(spec, ReplicaSpec)
        self._share = EngineShare(self._spec, replica)
        self._plugins = load_plugins()
        self._cancelled = threading.Event()

    def take_devices(self) -> Any:
        """Hold this node's devices; return the `Member` as builtins."""
        return to_data(self._share.take_devices(self._plugins))

    def check(self, group: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> Any:
        """Run this node's ranks of the pre-flight; return their `RankOutcome`s as builtins."""
        member = self._share.member
        assert member is not None
        spec = from_data(group, GroupSpec)
        # Here, not at the leader: each node chooses its own interfaces.
        setup = self._plugins.backend(self._spec.kind).group(spec)
        hints = preflight_hints(self._spec, [from_data(data, Member) for data in members], self._plugins)
        outcomes = run_ranks(setup, spec, node=member.node, hints=hints, cancelled=self._cancelled)
        return to_data(outcomes)

    def cancel_check(self) -> None:
        """End the pre-flight: a rank on another node failed."""
        self._cancelled.set()

    def launch(self, engine: Mapping[str, Any]) -> int:
        """Start the engine of this node (`EngineSpec` as builtins); return its process id."""
        return self._share.launch(from_data(engine, EngineSpec), self._plugins).pid

    def ended(self) -> Any:
        """Wait for the engine's end; return why it ended, an `ErrorReport` as builtins."""
        engine = self._share.engine
        assert engine is not None
        engine.wait()
        return to_data(engine.failure().report)

    def stop(self) -> None:
        """End the engine and let go of the devices."""
        self._share.stop()


class Followers:
    """The leader's side: the group's further nodes, in order; none for a group on one node."""

    def __init__(self, spec: ReplicaSpec, replica: str):
        """Start nothing yet."""
        self._spec = spec
        self._replica = replica
        self._actors: list[Any] = []

    def take_devices(self) -> tuple[Member, ...]:
        """Start an actor in each bundle of the placement group behind the first; they hold their nodes' devices.

        Raises:
            HeteroError: as `EngineShare.take_devices`.
        """
        self._actors = [_start(self._spec, self._replica, bundle) for bundle in range(1, self._spec.nodes)]
        members = _get([actor.take_devices.remote() for actor in self._actors])
        return tuple(from_data(data, Member) for data in members)

    def start_check(self, group: GroupSpec, members: Sequence[Member]) -> Sequence[Any]:
        """Start the pre-flight of the further nodes' ranks; `outcomes` waits for them."""
        return [actor.check.remote(to_data(group), to_data(members)) for actor in self._actors]

    def cancel_check(self) -> None:
        """End the pre-flight on the further nodes; their ranks would only wait for one that failed."""
        for actor in self._actors:
            actor.cancel_check.remote()

    def first_failed(self, checks: Sequence[Any]) -> bool:
        """Wait until a further node's ranks of `start_check` failed, or all are through; return whether one failed."""
        left = list(checks)
        while left:
            (done,), left = ray.wait(left, num_returns=1)
            try:
                outcomes = (from_data(data, RankOutcome) for data in ray.get(done))
                if any(outcome.ending is not Ending.PASSED for outcome in outcomes):
                    return True
            except ray.exceptions.RayError:
                return True
        return False

    def outcomes(self, checks: Sequence[Any]) -> tuple[RankOutcome, ...]:
        """Return how the ranks of `start_check` ended."""
        return tuple(from_data(data, RankOutcome) for node in _get(checks) for data in node)

    def launch(self, engines: Sequence[EngineSpec]) -> None:
        """Start the headless engines, one per further node."""
        _get([actor.launch.remote(to_data(engine)) for actor, engine in zip(self._actors, engines, strict=True)])

    def first_end(self) -> HeteroError | None:
        """Wait until one of the further engines has ended and return why; None at once when there is none."""
        if not self._actors:
            return None
        first, _ = ray.wait([actor.ended.remote() for actor in self._actors], num_returns=1)
        try:
            return from_report(from_data(ray.get(first[0]), ErrorReport))
        except ray.exceptions.RayError as error:
            return _lost(error)

    def stop(self) -> None:
        """End the engines and the actors of the further nodes. Safe to call twice."""
        actors, self._actors = self._actors, []
        for actor in actors:
            # Its node may be the one that was lost; Ray ends the actor with its placement group then.
            with suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=STOP_S)
            ray.kill(actor)


def _start(spec: ReplicaSpec, replica: str, bundle: int) -> Any:
    group = ray.util.get_current_placement_group()
    assert group is not None, "a group over nodes has a placement group"
    resources = dict(group.bundle_specs[bundle])
    return (
        ray.remote(RankHost)
        .options(
            num_cpus=0,
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_concurrency=THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        )
        .remote(to_data(spec), replica)
    )


def _get(calls: Sequence[Any]) -> list[Any]:
    """Return the results of all `calls`; an error of ours that one raised comes out as itself.

    Raises:
        ReplicaLost: a further node is gone.
    """
    try:
        results: list[Any] = ray.get(list(calls))
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, HeteroError) else error from None
    except ray.exceptions.RayActorError as error:
        raise _lost(error) from error
    return results


def _lost(error: Exception) -> ReplicaLost:
    return ReplicaLost("another node of the group was lost", cause=str(error).splitlines()[0])
