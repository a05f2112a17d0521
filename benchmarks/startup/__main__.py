"""Time from the command to Ready, against the bare engine started by hand with the same command.

Run with ``python -m benchmarks.startup [--repeats N] [-o json]``. Order: serve, hand, hand, serve, in each repeat; the
start before them, which converts the model and fills the page cache, does not count.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from benchmarks import clock
from benchmarks.report import GOAL_COLUMNS, Goal, load_average, machine, machine_lines, number
from benchmarks.served import Served, Void
from benchmarks.startup.by_hand import EngineCommand, time_by_hand
from benchmarks.startup.timeline import PARTS, Timeline, seconds, timeline_of
from benchmarks.workplace import Workplace
from hetero_llm.cli import render

BUDGET_S = 12.0


def main() -> int:
    """Measure and print; 0 unless the run is void."""
    options = _options()
    about, before = machine(), load_average()
    try:
        with Workplace() as workplace:
            served, by_hand = _measure(workplace, options.repeats)
    except Void as reason:
        render.say(f"void: {reason}")
        return 1
    result = _result(served, by_hand)
    data = {"machine": about, "load_before": before, "load_after": load_average(), **result}
    if options.output == "table":
        for text in machine_lines(about, before, data["load_after"]):
            render.line(text)
        render.line()
    data["goals"] = [goal.data() for goal in result["goals"]]
    render.show(render.Format(options.output), data, *_tables(result, served, by_hand))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="each is two starts of either (2)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args()


def _measure(workplace: Workplace, repeats: int) -> tuple[list[Timeline], list[float]]:
    render.say("serve, not counted: converts the model if need be, fills the page cache")
    _, command = _serve(workplace)
    served: list[Timeline] = []
    by_hand: list[float] = []
    for what in ("serve", "hand", "hand", "serve") * repeats:
        if what == "serve":
            served.append(_serve(workplace)[0])
            render.say(f"serve    {served[-1].total:6.2f} s")
        else:
            by_hand.append(time_by_hand(command, workplace))
            render.say(f"by hand  {by_hand[-1]:6.2f} s")
    return served, by_hand


def _serve(workplace: Workplace) -> tuple[Timeline, EngineCommand]:
    served = Served(workplace)
    try:
        served.wait_ready()
        command = EngineCommand.of(served.replica()["engine_pid"])
        _check_that_it_answers(served.url, command.served_name)
        return timeline_of(served), command
    finally:
        served.close()
        _check_that_it_ended(workplace)


def _check_that_it_answers(url: str, model: str) -> None:
    """A Ready that comes before the endpoint answers would be worth nothing."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60.0)
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1})
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    if status != 200:
        raise Void(f"serve said it was ready, and answers with {status}")


def _check_that_it_ended(workplace: Workplace) -> None:
    give_up_s = clock.now_s() + 5.0
    while left := workplace.processes():
        if clock.now_s() > give_up_s:
            raise Void(f"serve left processes behind: {[process.cmdline() for process in left]}")


def _result(served: Sequence[Timeline], by_hand: Sequence[float]) -> dict[str, Any]:
    parts = {part: statistics.median(seconds(one)[part] for one in served) for part in PARTS}
    bare = statistics.median(by_hand)
    spread = max(_spread([one.total for one in served]), _spread(by_hand))
    goal = Goal(name="serve - by hand, s", value=parts["total"] - bare, limit=BUDGET_S, noise=spread)
    return {
        "serve_s": parts["total"],
        "by_hand_s": bare,
        "parts_s": parts,
        "engine_slower_s": parts["engine"] - bare,
        "serve_runs_s": [seconds(one) for one in served],
        "by_hand_runs_s": list(by_hand),
        "goals": [goal],
    }


def _spread(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _tables(result: dict[str, Any], served: Sequence[Timeline], by_hand: Sequence[float]) -> tuple[render.Table, ...]:
    ends = (
        ("serve to Ready", number(result["serve_s"]), [number(one.total) for one in served]),
        ("by hand to first token", number(result["by_hand_s"]), [number(value) for value in by_hand]),
    )
    parts = [(part, number(value), _remark(part, result)) for part, value in result["parts_s"].items()]
    return (
        render.Table(("start", "median, s", "runs"), ends),
        render.Table(("part of serve", "median, s", ""), tuple(parts)),
        render.Table(GOAL_COLUMNS, tuple(goal.cells() for goal in result["goals"])),
    )


def _remark(part: str, result: dict[str, Any]) -> str:
    if part == "engine":
        return f"{result['engine_slower_s']:+.2f} s against by hand"
    if part == "gateway":
        return "at the same time as the parts from deploy on"
    return "command to Ready block" if part == "total" else ""


if __name__ == "__main__":
    sys.exit(main())
