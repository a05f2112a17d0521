"""Runs a group's pre-flight: one short program per rank, all at once, before the engine takes minutes to load."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from hetero_llm.cluster.child import ChildProcess
from hetero_llm.cluster.group_verdict import Ending, RankOutcome, explains_itself
from hetero_llm.plugin import GroupSetup, GroupSpec, RankSpec, RootCausePattern
from hetero_llm.plugin.rank_line import RankLine, parse_line
from hetero_llm.plugin.rootcause import find_root_cause

# After a rank failed for want of another, the other gets this long to say what happened to it.
_SETTLE_S = 2.0
_POLL_S = 0.05
_KEPT_LINES = 400


def excused(setup: GroupSetup, spec: GroupSpec) -> str | None:
    """Return why the group needs no pre-flight, None when it does."""
    if any(rank.device.simulated and rank.device.stand_in is not None for rank in spec.ranks):
        return "the devices are simulated: there is nothing that could meet"
    if setup.preflight_argv is None:
        return f"the {setup.torch_backend} backend asks for none for a group of this shape"
    return None


def run_ranks(
    setup: GroupSetup,
    spec: GroupSpec,
    *,
    node: str,
    hints: Sequence[RootCausePattern] = (),
    cancelled: threading.Event | None = None,
) -> tuple[RankOutcome, ...]:
    """Run the ranks of `spec` that are on `node`, this node, and return how each ended, ascending by rank.

    Returns when all have ended, when one has failed (the others are stopped; one that failed for want of another is
    given two seconds to be explained), at the deadline, or when `cancelled` is set. No process is left.

    Args:
        setup: from the backend's `group` on this node: interfaces are chosen where they are.
        spec: the whole group, also the ranks on other nodes.
        node: name of this node.
        hints: patterns that put a library's cryptic line into words.
        cancelled: for a rank that failed on another node.
    """
    assert setup.preflight_argv is not None
    base = {name: value for name, value in os.environ.items() if name not in setup.env_remove}
    runs: list[_Run] = []
    started = time.monotonic()
    try:
        for rank, env in zip(spec.ranks, setup.rank_env, strict=True):
            if rank.node == node:
                runs.append(_Run(rank, env, started))
                runs[-1].start(setup.preflight_argv, {**base, **env})
        _wait(runs, spec.deadline_s, cancelled or threading.Event())
    finally:
        _stop(runs)
    return tuple(run.outcome(hints) for run in runs)


class _Run:
    """One rank's process and what it printed."""

    def __init__(self, rank: RankSpec, env: Mapping[str, str], started: float) -> None:
        self.rank = rank
        self.ending: Ending | None = None
        self._env = env
        self._started = started
        self._ended_after_s = 0.0
        self._exit_code: int | None = None
        self._child: ChildProcess | None = None
        self._line: RankLine | None = None
        self._text: deque[str] = deque(maxlen=_KEPT_LINES)

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            self._child = ChildProcess(argv, env=env, on_line=self._take)
        except OSError as error:
            self._text.append(str(error))
            self.end(Ending.NOT_STARTED)

    def poll(self) -> None:
        """Note the process's own end, if it has come."""
        if self.ending is not None or self._child is None or self._child.exit_code() is None:
            return
        code = self._exit_code = self._child.wait(1.0)
        assert code is not None
        self.end(Ending.PASSED if code == 0 else Ending.DIED if code < 0 else Ending.FAILED)

    def end(self, ending: Ending) -> None:
        """Note how the rank ended, unless it has ended before."""
        if self.ending is None:
            self.ending, self._ended_after_s = ending, time.monotonic() - self._started

    def terminate(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop(grace_s=0.5)

    def outcome(self, hints: Sequence[RootCausePattern] = ()) -> RankOutcome:
        assert self.ending is not None
        line = self._line
        cause, advice = self._explanation(hints)
        return RankOutcome(
            rank=self.rank.rank,
            node=self.rank.node,
            device=self.rank.device.uid,
            ended_after_s=self._ended_after_s,
            ending=self.ending,
            exit_code=self._exit_code,
            phase=line.phase if line else None,
            cause=cause,
            next=advice,
            backend=line.backend if line else None,
            device_id=line.device_id if line else None,
            interfaces=line.interfaces if line and line.interfaces else self._interfaces(),
            versions=line.versions if line else {},
            seconds=line.seconds if line else {},
            bandwidth_bytes_per_s=line.bandwidth_bytes_per_s if line else None,
        )

    def _explanation(self, hints: Sequence[RootCausePattern]) -> tuple[str | None, tuple[str, ...]]:
        if self.ending is Ending.PASSED:
            return None, ()
        stated = self._line.cause if self._line else None
        said = [*self._text, *([stated] if stated else [])]
        # Only what a pattern knows: tracebacks are for engines, a rank states its cause itself.
        known = [text for text in said if any(hint.pattern.search(text) for hint in hints)]
        found = find_root_cause(known, hints) if known else None
        if found is not None:
            return found.message, found.next
        return stated or _hang(self._text) or next((text for text in reversed(self._text) if text.strip()), None), ()

    def _interfaces(self) -> tuple[str, ...]:
        stated = (value for name, value in sorted(self._env.items()) if name.endswith("SOCKET_IFNAME"))
        return tuple(dict.fromkeys(stated))

    def _take(self, text: str) -> None:
        line = parse_line(text)
        if line is None:
            self._text.append(text)
        else:
            self._line = line


def _hang(lines: Sequence[str]) -> str | None:
    """Return where a rank hung that held the interpreter's lock: faulthandler's dump, which has the main thread last.

    Format: ``Timeout (0:00:30)!``, then per thread ``Thread 0x… (most recent call first):`` and ``File "…", line …``.
    """
    if not any(line.startswith("Timeout (") for line in lines):
        return None
    threads = [position for position, line in enumerate(lines) if "(most recent call first)" in line]
    places = [line.strip() for line in list(lines)[threads[-1] + 1 :]] if threads else []
    return f"not done after the deadline: it hangs in {places[0]}" if places else None


def _wait(runs: Sequence[_Run], deadline_s: float, cancelled: threading.Event) -> None:
    deadline = time.monotonic() + deadline_s
    settled_at: float | None = None
    while any(run.ending is None for run in runs):
        for run in runs:
            run.poll()
        failed = [run.outcome() for run in runs if run.ending not in (None, Ending.PASSED)]
        if failed and settled_at is None:
            settled_at = time.monotonic() + _SETTLE_S
        settled = settled_at is not None and time.monotonic() > settled_at
        if settled or cancelled.is_set() or any(explains_itself(outcome) for outcome in failed):
            return
        if time.monotonic() > deadline:
            for run in runs:
                run.end(Ending.OVERDUE)
        cancelled.wait(_POLL_S)


def _stop(runs: Sequence[_Run]) -> None:
    for run in runs:
        run.end(Ending.STOPPED)
    # All at once, then one by one: the grace of each would add up.
    for run in runs:
        run.terminate()
    for run in runs:
        run.stop()
