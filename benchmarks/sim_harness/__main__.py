"""What simulated engines cost: CPU of eight engines that together answer 200 requests a second, and how true they are.

Run with ``python -m benchmarks.sim_harness [--engines 8] [--rate 200] [--seconds 10] [--profile fast] [-o json]``.

Open-loop Poisson arrivals, spread at random over the engines: first all whole, then half of them streamed, then all
streamed. CPU is user + system time of the engine processes only. Then one engine alone is compared with its profile. A
row whose events were later than 2 ms at the 99th percentile is void: then the machine, not the profile, made the times.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

import uvloop

from benchmarks.report import load_average, machine, machine_lines
from benchmarks.sim_harness.engines import Engine
from benchmarks.sim_harness.load import Load, Result, run
from benchmarks.sim_harness.physics import compare
from benchmarks.sim_harness.verdict import Compared, is_void, validity
from hetero_llm.cli import render

ANSWERS = {"whole": 0.0, "half streamed": 0.5, "streamed": 1.0}
"""Name of a row to the share of its requests that is streamed."""


def main() -> int:
    """Measure and print; 1 when a row is void."""
    options = _options()
    about, before = machine(), load_average()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results, compared, rss_bytes = runner.run(_measure(options))
    if options.output == "table":
        for text in machine_lines(about, before, load_average()):
            render.line(text)
        render.line(f"resident memory {rss_bytes / 2**20:.0f} MiB an engine, at most")
        render.line()
    data = {
        "machine": about,
        "load_before": before,
        "load_after": load_average(),
        "engines": options.engines,
        "profile": options.profile,
        "rss_bytes": rss_bytes,
        "loads": [{**asdict(one), "verdict": validity(one.late_s)} for one in results],
        "profile_rows": [{**asdict(row), "verdict": row.verdict} for row in compared],
    }
    render.show(render.Format(options.output), data, _loads_table(options, results), _profile_table(compared))
    late = (*(one.late_s for one in results), *(row.late_s for row in compared))
    return int(any(map(is_void, late)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sim_harness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engines", type=int, default=8, metavar="N", help="processes (8)")
    parser.add_argument("--rate", type=float, default=200, metavar="R", help="requests per second in all (200)")
    parser.add_argument("--seconds", type=float, default=10, metavar="S", help="length of a row (10)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="generated per request (32)")
    parser.add_argument("--profile", default="fast", help="of all engines (fast)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args()


async def _measure(options: argparse.Namespace) -> tuple[list[Result], list[Compared], int]:
    """Return the rows of the loads, those of the comparison, and the largest engine's resident memory."""
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(options.profile)) for _ in range(options.engines)]
        results = []
        for name, streamed in ANSWERS.items():
            render.say(f"{options.seconds:g} s of {options.rate:g} requests/s: {name}")
            load = Load(name=name, rate=options.rate, seconds=options.seconds, tokens=options.tokens, streamed=streamed)
            results.append(await run(engines, load))
        render.say("one engine against its profile")
        compared = await compare(engines[0], options.profile)
        return results, compared, max(engine.process.memory_info().rss for engine in engines)


def _loads_table(options: argparse.Namespace, results: Sequence[Result]) -> render.Table:
    title = (
        f"{options.engines} engines ({options.profile}), {options.rate:g} requests/s in all, {options.tokens} tokens "
        f"each, {options.seconds:g} s a row"
    )
    columns = ("answers", "req/s", "chunks/s", "CPU % of a core", "µs/req", "TTFT p50 ms", "late p99 ms", "verdict")
    return render.Table(columns, tuple(_load_row(one) for one in results), title=title)


def _load_row(one: Result) -> tuple[object, ...]:
    return (
        one.load.name,
        f"{one.requests / one.wall_s:.0f}",
        f"{one.chunks / one.wall_s:.0f}",
        f"{one.cpu_s / one.wall_s * 100:.1f}",
        f"{one.cpu_s / one.requests * 1e6:.0f}" if one.requests else None,
        _ms(one.first_p50_s, 1),
        _ms(one.late_s, 1),
        validity(one.late_s),
    )


def _profile_table(compared: Sequence[Compared]) -> render.Table:
    columns = ("one engine alone", "measured ms", "profile ms", "difference %", "late p99 ms", "verdict")
    return render.Table(columns, tuple(_profile_row(row) for row in compared))


def _profile_row(row: Compared) -> tuple[object, ...]:
    times = (_ms(row.measured_s, 2), _ms(row.profile_s, 2))
    return (row.name, *times, f"{row.difference * 100:+.1f}", _ms(row.late_s, 1), row.verdict)


def _ms(seconds: float | None, digits: int) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.{digits}f}"


if __name__ == "__main__":
    raise SystemExit(main())
