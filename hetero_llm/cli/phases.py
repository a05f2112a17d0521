"""How a start looks: a live table on a terminal; elsewhere one line per phase and a sign of life every 30 seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hetero_llm.cli import render
from hetero_llm.model import ReplicaState, ReplicaStatus

HEARTBEAT_S = 30.0
PERCENT_STEP = 25


class Display(Protocol):
    """What the supervisor tells while it starts."""

    def step(self, text: str) -> None:
        """Say what begins now."""

    def progress(self, phase: str, done: int | None, total: int | None) -> None:
        """Show how far a step with known size is, in bytes."""

    def replicas(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Show the replicas as they are now."""

    def close(self) -> None:
        """Leave the screen as text that stays."""


def display_for_stderr(clock: Callable[[], float] = time.monotonic) -> Display:
    """Return the display that fits where stderr goes."""
    return LiveDisplay(clock) if render.stderr_is_terminal() else LineDisplay(clock)


class LineDisplay:
    """For logs and pipes: a line when something changes, a heartbeat when nothing does."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, heartbeat_s: float = HEARTBEAT_S):
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._told: dict[str, str] = {}
        self._last_s = self._start_s = clock()

    def step(self, text: str) -> None:
        """Say what begins now."""
        self._say(text)

    def progress(self, phase: str, done: int | None, total: int | None) -> None:
        """Say a phase when it begins, and each quarter of it."""
        quarter = f" {100 * done // total // PERCENT_STEP * PERCENT_STEP}%" if done and total else ""
        if self._changed("step", phase + quarter):
            self._say(phase + (f" ({render.progress_text(done, total)})" if quarter else ""))

    def replicas(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Say each replica's new phase; every `heartbeat_s` without news, the phases that last."""
        for status in replicas:
            if self._changed(status.replica, phase_text(status)):
                self._say(f"{status.replica}: {phase_text(status)}")
        if replicas and self._clock() - self._last_s >= self._heartbeat_s:
            waiting = (status for status in replicas if status.state is not ReplicaState.READY)
            self._say("; ".join(f"{status.replica}: still {phase_text(status)}" for status in waiting) or "waiting")

    def close(self) -> None:
        """Nothing is open."""

    def _changed(self, who: str, text: str) -> bool:
        changed = self._told.get(who) != text
        self._told[who] = text
        return changed

    def _say(self, text: str) -> None:
        self._last_s = self._clock()
        render.say(f"[{self._last_s - self._start_s:5.1f} s] {text}")


class LiveDisplay:
    """For terminals: steps stay as lines, replicas are one table that is drawn again in place."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._screen = render.LiveScreen()

    def step(self, text: str) -> None:
        """Say what begins now, above the table."""
        self._screen.print(text)

    def progress(self, phase: str, done: int | None, total: int | None) -> None:
        """Draw the phase with its bytes in place."""
        self._screen.draw(f"{phase}  {render.progress_text(done, total)}")

    def replicas(self, replicas: Sequence[ReplicaStatus]) -> None:
        """Draw one row per replica."""
        self._screen.draw(phase_table(replicas))

    def close(self) -> None:
        """Keep what was last drawn."""
        self._screen.close()


def phase_text(status: ReplicaStatus) -> str:
    """Return what a replica does now, in words."""
    if status.state is ReplicaState.READY:
        return "ready" + (f" after {status.ready_after_s:.1f} s" if status.ready_after_s is not None else "")
    if status.state is ReplicaState.STARTING:
        return status.phase or "starting"
    return str(status.state)


def phase_table(replicas: Sequence[ReplicaStatus]) -> render.Table:
    """Return the replicas with their phase and the seconds it has lasted."""
    rows = tuple(
        (
            status.replica,
            status.kind,
            status.node,
            ",".join(status.devices) or None,
            phase_text(status),
            _seconds(status),
        )
        for status in replicas
    )
    return render.Table(("replica", "kind", "node", "devices", "phase", "for"), rows, empty="waiting for the replicas")


def _seconds(status: ReplicaStatus) -> str | None:
    lasting = status.state is ReplicaState.STARTING and status.phase_since_s is not None
    return f"{status.phase_since_s:.0f} s" if lasting else None
