"""Two ways to the same engine, measured in turns."""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.overhead.load import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What the second way adds to the first.

    Attributes:
        p50_s: difference of the medians, over runs, of each run's median time to first text.
        p99_s: difference of the 99th percentiles of all requests of each way.
        throughput_ratio: second over first, medians over runs.
    """

    p50_s: float
    p99_s: float
    throughput_ratio: float


@dataclass(frozen=True, slots=True)
class Way:
    """The runs of one way.

    Attributes:
        runs: in the order they were made.
    """

    runs: tuple[Run, ...]

    @property
    def p50_s(self) -> float:
        """Median over runs of the median time to first text."""
        return statistics.median(statistics.median(run.first_text_s) for run in self.runs)

    @property
    def p99_s(self) -> float:
        """99th percentile (nearest rank) of the time to first text of all requests."""
        ordered = sorted(seconds for run in self.runs for seconds in run.first_text_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]

    @property
    def tokens_per_s(self) -> float:
        """Median over runs."""
        return statistics.median(run.tokens_per_s for run in self.runs)

    @property
    def client_cores(self) -> float:
        """Most that the client used in a run, in cores."""
        return max(run.client_cores for run in self.runs)


async def in_turns(
    first: Callable[[], Awaitable[Run]], second: Callable[[], Awaitable[Run]], repeats: int
) -> list[Way]:
    """Run first, second, second, first, `repeats` times; return both ways."""
    runs: tuple[list[Run], list[Run]] = ([], [])
    for which in (0, 1, 1, 0) * repeats:
        runs[which].append(await (first, second)[which]())
    return [Way(tuple(way)) for way in runs]


def difference(first: Way, second: Way) -> Difference:
    """Return what `second` adds to `first`."""
    return Difference(
        p50_s=second.p50_s - first.p50_s,
        p99_s=second.p99_s - first.p99_s,
        throughput_ratio=second.tokens_per_s / first.tokens_per_s,
    )
