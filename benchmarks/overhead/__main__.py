"""What the gateway adds to the engine: time to first token, throughput, memory.

Run with ``python -m benchmarks.overhead [--repeats N] [-o json]``. One engine, the same requests, straight to it and
through the gateway. First direct against direct, which is the noise; then direct, gateway, gateway, direct.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import psutil
import uvloop

from benchmarks.overhead import cpu
from benchmarks.overhead.compare import Difference, Way, difference, in_turns
from benchmarks.overhead.load import Request, Run, requests, run
from benchmarks.overhead.memory import LIMITS_MB, MB, Memory, memories
from benchmarks.report import GOAL_COLUMNS, Goal, load_average, machine, machine_lines, number
from benchmarks.served import Served, Void
from benchmarks.workplace import Workplace
from hetero_llm.cli import render

LOADS = {1: (16, (12, 20)), 16: (48, (24, 40))}
"""Concurrency → requests of one run, and the shortest and longest answer in tokens. Some 10 s each on two cores."""

SEED = 0
ADDED_P50_LIMIT_MS = 5.0
THROUGHPUT_LIMIT = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Everything measured at one concurrency.

    Attributes:
        noise: direct against direct.
        added: gateway against direct.
        gateway_cpu_us: CPU of the gateway process per generated token, its share of each request included.
    """

    concurrency: int
    direct: Way
    gateway: Way
    noise: Difference
    added: Difference
    gateway_cpu_us: float


def main() -> int:
    """Measure and print; 0 unless the run is void."""
    options = _options()
    about, before = machine(), load_average()
    try:
        with Workplace() as workplace:
            comparisons, processes, others_cores = _measure(workplace, options.repeats, options.concurrency)
    except (Void, TimeoutError) as reason:
        render.say(f"void: {reason!r}")
        return 1
    goals = (*_speed_goals(comparisons), *_memory_goals(processes))
    after = load_average()
    if options.output == "table":
        for text in machine_lines(about, before, after):
            render.line(text)
        render.line(f"others on the machine used {others_cores:.2f} cores while it was measured")
        render.line()
    data = {
        "machine": about,
        "load_before": before,
        "load_after": after,
        "others_cores": others_cores,
        "comparisons": [_data(one) for one in comparisons],
        "memory": [asdict(one) for one in processes],
        "goals": [goal.data() for goal in goals],
    }
    render.show(render.Format(options.output), data, *_tables(comparisons, processes, goals))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="each is two runs of either way (3)")
    parser.add_argument("--concurrency", type=int, nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args()


def _measure(
    workplace: Workplace, repeats: int, concurrencies: Sequence[int]
) -> tuple[list[Comparison], tuple[Memory, ...], float]:
    render.say("starting serve")
    served = Served(workplace)
    try:
        served.wait_ready()
        before = served.replica()
        render.say(f"serving on {served.url}, engine on {before['endpoint']}")
        began_s, busy_s, ours_s = time.monotonic(), cpu.busy_s(), _ours_s(workplace)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            comparisons = [runner.run(_compare(served, before, repeats, level)) for level in concurrencies]
        others_s = (cpu.busy_s() - busy_s) - (_ours_s(workplace) - ours_s)
        if served.replica()["replica"] != before["replica"]:
            raise Void("the replica was replaced while it was measured")
        processes = memories(served.process.pid, served.status())
        return comparisons, processes, max(0.0, others_s / (time.monotonic() - began_s))
    finally:
        served.close()


def _ours_s(workplace: Workplace) -> float:
    return cpu.used_s((*workplace.processes(), psutil.Process()))


async def _compare(served: Served, replica: Mapping[str, Any], repeats: int, concurrency: int) -> Comparison:
    todo = requests(replica["model"], *LOADS[concurrency], SEED)
    direct = _told("direct", functools.partial(run, f"http://{replica['endpoint']}", todo, concurrency))
    metered = _Metered(served.url, todo, concurrency, served.status()["gateway"]["pid"])
    gateway = _told("gateway", metered)
    render.say(f"concurrency {concurrency}: not counted; whoever came first would fill the prefix cache for the other")
    await direct()
    await gateway()
    render.say(f"concurrency {concurrency}: direct against direct")
    noise = difference(*await in_turns(direct, direct, repeats))
    render.say(f"concurrency {concurrency}: direct against gateway")
    metered.cpu_s = 0.0
    ways = await in_turns(direct, gateway, repeats)
    tokens = sum(request.tokens for request in todo) * len(ways[1].runs)
    return Comparison(
        concurrency=concurrency,
        direct=ways[0],
        gateway=ways[1],
        noise=noise,
        added=difference(*ways),
        gateway_cpu_us=metered.cpu_s / tokens * 1e6,
    )


def _told(name: str, way: Callable[[], Awaitable[Run]]) -> Callable[[], Awaitable[Run]]:
    """Return `way`, telling each result as it comes."""

    async def told() -> Run:
        result = await way()
        p50_ms = statistics.median(result.first_text_s) * 1e3
        render.say(f"  {name:8} first token p50 {p50_ms:7.1f} ms  {result.tokens_per_s:6.1f} tokens/s")
        return result

    return told


class _Metered:
    """The way through the gateway; adds up the CPU time it costs there."""

    def __init__(self, url: str, todo: Sequence[Request], concurrency: int, pid: int):
        self.cpu_s = 0.0
        self._run = functools.partial(run, url, todo, concurrency)
        self._pid = pid

    async def __call__(self) -> Run:
        before_s = cpu.process_cpu_s(self._pid)
        result = await self._run()
        self.cpu_s += cpu.process_cpu_s(self._pid) - before_s
        return result


def _speed_goals(comparisons: Sequence[Comparison]) -> tuple[Goal, ...]:
    goals = []
    for one in comparisons:
        level = f"concurrency {one.concurrency}"
        goals += [
            Goal(
                name=f"{level}: added time to first token p50, ms",
                value=one.added.p50_s * 1e3,
                limit=ADDED_P50_LIMIT_MS,
                noise=abs(one.noise.p50_s) * 1e3,
            ),
            Goal(
                name=f"{level}: throughput through the gateway over direct",
                value=one.added.throughput_ratio,
                limit=THROUGHPUT_LIMIT,
                at_least=True,
                noise=abs(one.noise.throughput_ratio - 1.0),
            ),
        ]
    return tuple(goals)


def _memory_goals(processes: Sequence[Memory]) -> tuple[Goal, ...]:
    rss = [
        Goal(name=f"{role}: resident memory, MB", value=_rss_mb(processes, role), limit=limit)
        for role, limit in LIMITS_MB.items()
    ]
    with_engine = sum(one.has_engine_libraries for one in processes)
    return (*rss, Goal(name="processes with torch or vllm mapped, engine aside", value=with_engine, limit=0))


def _rss_mb(processes: Sequence[Memory], role: str) -> float | None:
    found = [one.rss_bytes / MB for one in processes if one.role == role]
    return max(found) if found else None


def _data(one: Comparison) -> dict[str, object]:
    ways = {
        name: {
            "p50_ms": way.p50_s * 1e3,
            "p99_ms": way.p99_s * 1e3,
            "tokens_per_s": way.tokens_per_s,
            "client_cores": way.client_cores,
            "runs": [asdict(one_run) for one_run in way.runs],
        }
        for name, way in (("direct", one.direct), ("gateway", one.gateway))
    }
    return {
        "concurrency": one.concurrency,
        **ways,
        "noise": asdict(one.noise),
        "added": asdict(one.added),
        "gateway_cpu_us_per_token": one.gateway_cpu_us,
    }


def _tables(
    comparisons: Sequence[Comparison], processes: Sequence[Memory], goals: Sequence[Goal]
) -> tuple[render.Table, ...]:
    memory: list[tuple[object, ...]] = [
        (one.role, one.pid, round(one.rss_bytes / MB), round(one.pss_bytes / MB), one.has_engine_libraries)
        for one in processes
    ]
    memory.append(("all together", None, None, round(sum(one.pss_bytes for one in processes) / MB), None))
    return (
        render.Table(
            (
                "concurrency",
                "way",
                "first token p50, ms",
                "p99, ms",
                "tokens/s",
                "gateway CPU, us/token",
                "client, cores",
            ),
            tuple(row for one in comparisons for row in _rows(one)),
        ),
        render.Table(("process", "pid", "RSS, MB", "PSS, MB", "torch or vllm"), tuple(memory)),
        render.Table(GOAL_COLUMNS, tuple(goal.cells() for goal in goals)),
    )


def _rows(one: Comparison) -> tuple[tuple[object, ...], ...]:
    def row(name: str, way: Way, cpu_us: float | None) -> tuple[object, ...]:
        numbers = (way.p50_s * 1e3, way.p99_s * 1e3, way.tokens_per_s, cpu_us, way.client_cores)
        return (one.concurrency, name, *(number(value) for value in numbers))

    def change(name: str, what: Difference) -> tuple[object, ...]:
        times = (f"{what.p50_s * 1e3:+.2f}", f"{what.p99_s * 1e3:+.2f}")
        return (one.concurrency, name, *times, f"x {what.throughput_ratio:.3f}", None, None)

    return (
        row("direct", one.direct, None),
        row("gateway", one.gateway, one.gateway_cpu_us),
        change("gateway - direct", one.added),
        change("direct - direct", one.noise),
    )


if __name__ == "__main__":
    sys.exit(main())
