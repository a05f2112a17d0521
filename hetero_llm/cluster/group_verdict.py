"""Judges how the ranks of a group's pre-flight ended: which one failed first by itself, and what to say about it.

Pure: outcomes in, report or error out. When one rank fails the others fail too, each in its own words and many of them
later, so the last error is the least useful.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import GroupSetup, GroupSpec
from hetero_llm.plugin.rank_line import PHASES


class Ending(StrEnum):
    """How one rank of a pre-flight ended."""

    PASSED = "passed"
    FAILED = "failed"
    DIED = "died"
    NOT_STARTED = "not started"
    OVERDUE = "overdue"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOutcome:
    """How one rank ended, and what it said about itself.

    Attributes:
        device: the planned device's uid.
        ended_after_s: seconds from the start of its node's ranks to its end.
        ending: `OVERDUE` ran past the deadline; `STOPPED` was ended because another rank had failed.
        exit_code: exit status, negative for a signal; None when the rank was ended or never began.
        phase: what it was doing; None when its program does not tell.
        cause: why it failed, in one line.
        next: what to do about a known cause.
        backend: collective backend it used.
        device_id: the vendor's identity of the device it really used.
        interfaces: network interfaces it was told to use, or would use.
        versions: torch, collective library and what else it tells.
        seconds: time spent per phase.
        bandwidth_bytes_per_s: bytes of the measured vector over the median time of its all-reduce.
    """

    rank: int
    node: str
    device: str
    ended_after_s: float
    ending: Ending
    exit_code: int | None = None
    phase: str | None = None
    cause: str | None = None
    next: tuple[str, ...] = ()
    backend: str | None = None
    device_id: str | None = None
    interfaces: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """A group that passed its pre-flight, or was excused from it.

    Attributes:
        torch_backend: the collective backend its ranks use.
        ranks: all ranks, ascending; empty when nothing was run.
        bandwidth_bytes_per_s: the slowest rank's; None when not measured.
        seconds: from start to the last rank's end; None when nothing was run.
        not_run: why nothing was run.
    """

    torch_backend: str
    ranks: tuple[RankOutcome, ...] = ()
    bandwidth_bytes_per_s: float | None = None
    seconds: float | None = None
    not_run: str | None = None


# How far a failure is from its origin: the rank's own, a peer or the way to it, it waited, the runner ended it.
_OWN, _LOST_PEER, _WAITING, _ENDED = range(4)
# Another rank, or the way to it, is the reason; what happened there explains more.
_NETWORK = re.compile(
    r"trying to connect|no connection to|connect(?:ion)? ?(?:to \S+ )?(?:timed out|timeout|refused|reset|closed|failed)"
    r"|closed by peer|reset by peer|no route to host|network is unreachable|broken pipe|remote process exited"
    r"|ncclRemoteError",
    re.IGNORECASE,
)
_WAITED = re.compile(r"tim(?:ed?|es) ?-?out|not done after|never came|did not finish|did not leave", re.IGNORECASE)
_MOST_OTHERS = 8


def judge(setup: GroupSetup, spec: GroupSpec, outcomes: Sequence[RankOutcome]) -> GroupReport:
    """Return the report of a group all of whose ranks passed; `outcomes` are those of all its nodes together.

    Raises:
        GroupPreflightFailed: names the rank that failed first by itself, its node, device, interface and versions. A
            rank that died or said what is wrong goes before one that lost its connection, that before one that only
            waited, and among equals the earlier before the later.
    """
    outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    failed = [outcome for outcome in outcomes if outcome.ending is not Ending.PASSED]
    if failed:
        raise _failed(_first(failed), setup, spec, outcomes)
    for rank in spec.ranks:
        if rank.rank not in by_rank:
            raise GroupPreflightFailed(
                f"nothing was heard of rank {rank.rank} on {rank.node} in the {setup.torch_backend} pre-flight",
                next=(f"check the node {rank.node}", "hetero-llm devices"),
            )
    ordered = tuple(by_rank[rank.rank] for rank in spec.ranks)
    _refuse_other_backend(ordered, setup)
    _refuse_shared_device(ordered, setup)
    speeds = [outcome.bandwidth_bytes_per_s for outcome in ordered]
    return GroupReport(
        torch_backend=setup.torch_backend,
        ranks=ordered,
        bandwidth_bytes_per_s=None if None in speeds else min(speed for speed in speeds if speed is not None),
        seconds=max(outcome.ended_after_s for outcome in ordered),
    )


def explains_itself(outcome: RankOutcome) -> bool:
    """Return whether the rank failed for a reason of its own, so that no other rank can tell more."""
    return outcome.ending is not Ending.PASSED and _remoteness(outcome) == _OWN


def _first(failed: Sequence[RankOutcome]) -> RankOutcome:
    """Return the outcome nearest to the origin; where all only waited, the rank that had come least far."""
    nearest = min(_remoteness(outcome) for outcome in failed)
    if nearest < _WAITING:
        candidates = [outcome for outcome in failed if _remoteness(outcome) == nearest]
        return min(candidates, key=lambda outcome: (outcome.ended_after_s, outcome.rank))
    return min(failed, key=lambda outcome: (_progress(outcome), _remoteness(outcome), outcome.ended_after_s))


def _progress(outcome: RankOutcome) -> int:
    # A program of a vendor's own tells no phases: then all have come equally far.
    return PHASES.index(outcome.phase) if outcome.phase in PHASES else 0


def _remoteness(outcome: RankOutcome) -> int:
    """Return how far the failure is from its origin."""
    if outcome.ending is Ending.STOPPED:
        return _ENDED
    if outcome.ending is Ending.OVERDUE:
        return _WAITING
    if outcome.ending is Ending.FAILED and outcome.cause:
        if _NETWORK.search(outcome.cause):
            return _LOST_PEER
        if _WAITED.search(outcome.cause):
            return _WAITING
    return _OWN


def _failed(
    first: RankOutcome, setup: GroupSetup, spec: GroupSpec, outcomes: Sequence[RankOutcome]
) -> GroupPreflightFailed:
    return GroupPreflightFailed(
        f"{_name(first)} {_what(first, spec)} in the {setup.torch_backend} pre-flight",
        cause=_cause(first, outcomes),
        next=(*first.next, *_advice(first, spec), *_version_advice(outcomes), "hetero-llm doctor"),
    )


def _cause(first: RankOutcome, outcomes: Sequence[RankOutcome]) -> str | None:
    """Return the rank's own words; where they do not tell all, also how far the others were."""
    words = None if first.ending is Ending.STOPPED else first.cause
    if _remoteness(first) == _OWN:
        return words
    others = [_state(outcome) for outcome in outcomes if outcome is not first]
    return "; ".join([*([words] if words else []), *others[:_MOST_OTHERS]]) or None


def _state(outcome: RankOutcome) -> str:
    phase = f" in its phase {outcome.phase}" if outcome.phase else ""
    said = f" ({outcome.cause})" if outcome.cause and outcome.ending is Ending.FAILED else ""
    return f"rank {outcome.rank} on {outcome.node} {outcome.ending.value}{phase}{said}"


def _name(outcome: RankOutcome) -> str:
    facts = [f"device {outcome.device}"]
    if outcome.interfaces:
        facts.append(f"interface {', '.join(outcome.interfaces)}")
    facts += [f"{library} {version}" for library, version in outcome.versions.items()]
    return f"rank {outcome.rank} on {outcome.node} ({'; '.join(facts)})"


def _what(outcome: RankOutcome, spec: GroupSpec) -> str:
    phase = f" in its phase {outcome.phase}" if outcome.phase else ""
    match outcome.ending:
        case Ending.FAILED:
            return f"failed{phase}"
        case Ending.DIED:
            return f"was killed by signal {-(outcome.exit_code or 0)}{phase}"
        case Ending.NOT_STARTED:
            return "could not be started"
        case Ending.OVERDUE:
            return f"did not finish within {spec.deadline_s:.0f} s{phase}"
        case _:
            return f"was stopped{phase} after {outcome.ended_after_s:.0f} s"


def _advice(outcome: RankOutcome, spec: GroupSpec) -> tuple[str, ...]:
    if outcome.ending is Ending.DIED and outcome.exit_code == -9:
        return (f"see whether the kernel killed it for lack of memory: dmesg on {outcome.node}",)
    address = next(rank.address for rank in spec.ranks if rank.rank == outcome.rank)
    if _remoteness(outcome) != _OWN:
        return (f"check that {address} reaches {spec.master_address}:{spec.master_port} and the other ranks",)
    return ()


def _version_advice(outcomes: Sequence[RankOutcome]) -> tuple[str, ...]:
    """Return one step per library of which the ranks have different versions."""
    nodes: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        for library, version in outcome.versions.items():
            nodes.setdefault(library, {}).setdefault(version, outcome.node)
    return tuple(
        f"install one version of {library}: " + ", ".join(f"{version} on {node}" for version, node in where.items())
        for library, where in nodes.items()
        if len(where) > 1
    )


def _refuse_other_backend(outcomes: Sequence[RankOutcome], setup: GroupSetup) -> None:
    for outcome in outcomes:
        if outcome.backend not in (None, setup.torch_backend):
            raise GroupPreflightFailed(
                f"{_name(outcome)} used {outcome.backend} in the {setup.torch_backend} pre-flight",
                next=("hetero-llm doctor",),
            )


def _refuse_shared_device(outcomes: Sequence[RankOutcome], setup: GroupSetup) -> None:
    seen: dict[tuple[str, str], RankOutcome] = {}
    for outcome in outcomes:
        if outcome.device_id is None:
            continue
        other = seen.setdefault((outcome.node, outcome.device_id), outcome)
        if other is not outcome:
            raise GroupPreflightFailed(
                f"ranks {other.rank} and {outcome.rank} on {outcome.node} both ran on device {outcome.device_id} "
                f"in the {setup.torch_backend} pre-flight, instead of {other.device} and {outcome.device}",
                next=("hetero-llm doctor",),
            )
