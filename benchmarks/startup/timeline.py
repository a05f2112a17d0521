"""Where the time of a start goes, read from outside: what `serve` says, and when the kernel started which process."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from itertools import pairwise

from benchmarks import clock
from benchmarks.served import Served, Void


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of one start. All but `gateway` follow each other and add up to `total`.

    Attributes:
        command: interpreter, imports, configuration, checks of the command line.
        discover: probe the devices, plan, look at the model's folder.
        cluster: start the local Ray.
        deploy: start Serve, place the replica's actor, its process and imports.
        actor: from the actor's first line to the engine's process: plugins, device lease.
        engine: from the engine's process to its first generated token.
        notice: from there to the Ready block on the terminal.
        total: from the command to the Ready block.
        gateway: from the end of `cluster` to the gateway listening; at the same time as `deploy` and later.
    """

    command: float
    discover: float
    cluster: float
    deploy: float
    actor: float
    engine: float
    notice: float
    total: float
    gateway: float


PARTS = tuple(field.name for field in fields(Timeline))


def timeline_of(served: Served) -> Timeline:
    """Return the timeline of a `serve` that is ready.

    Raises:
        Void: a line or a number of it is missing.
    """
    replica = served.replica()
    if replica["ready_after_s"] is None:
        raise Void("the replica was ready before but is not now")
    actor_s = clock.from_unix_s(replica["started_unix_s"])
    marks = (
        served.started_s,
        _said(served, "looking for devices"),
        _said(served, "starting a local cluster"),
        cluster_s := _said(served, "deploying"),
        actor_s,
        clock.process_start_s(replica["engine_pid"]),
        actor_s + replica["ready_after_s"],
        served.ready_s,
    )
    command, discover, cluster, deploy, actor, engine, notice = (b - a for a, b in pairwise(marks))
    return Timeline(
        command=command,
        discover=discover,
        cluster=cluster,
        deploy=deploy,
        actor=actor,
        engine=engine,
        notice=notice,
        total=served.ready_s - served.started_s,
        gateway=served.gateway_s - cluster_s,
    )


def seconds(timeline: Timeline) -> dict[str, float]:
    """Return part → seconds."""
    return dict(zip(PARTS, astuple(timeline), strict=True))


def _said(served: Served, text: str) -> float:
    found = next((at for at, line in served.said if text in line), None)
    if found is None:
        raise Void(f"serve did not say {text!r}")
    return found
