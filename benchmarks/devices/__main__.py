"""Time of `hetero-llm devices` on a node with eight NPUs. Run with ``python -m benchmarks.devices [-o json]``.

The driver library is the fake one of the tests, in C, and answers at once; the rest is what runs on a real node: the
command, one discovery process per installed kind, the backend's ctypes calls. A real driver adds its own time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.report import GOAL_COLUMNS, Goal, load_average, machine, machine_lines, number
from benchmarks.workplace import Workplace
from hetero_llm.cli import render

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from fake_ascend import FakeChip, Machine, build_dcmi

DEVICES = 8
LIMIT_S = 2.0


def main() -> int:
    """Measure and print; 1 when the command failed or did not find the devices."""
    options = _options()
    about, before = machine(), load_average()
    with Workplace() as workplace:
        library = build_dcmi(workplace.root)
        if library is None:
            print("void: no C compiler for the fake driver library", file=sys.stderr)
            return 1
        fake = Machine(workplace.root / "machine")
        chips = [FakeChip(card=index, logical=index, physical=index, bus=0xC0 + index) for index in range(DEVICES)]
        fake.dcmi(library, chips)
        env = {**workplace.env, **fake.environment()}
        taken_s = [_run(env) for _ in range(options.repeats)]
    if None in taken_s:
        print("void: the command failed or did not find the devices", file=sys.stderr)
        return 1
    runs_s = [seconds for seconds in taken_s if seconds is not None]
    goal = Goal(name="slowest, s", value=max(runs_s), limit=LIMIT_S)
    if options.output == "table":
        for text in machine_lines(about, before, load_average()):
            render.line(text)
        render.line()
    data = {"machine": about, "devices": DEVICES, "s": runs_s, "goals": [goal.data()]}
    row = (f"devices, {DEVICES} NPUs", number(median(runs_s)), number(min(runs_s)), number(max(runs_s)))
    table = render.Table(("command", "median, s", "fastest", "slowest"), (row,), title=f"{len(runs_s)} runs")
    render.show(render.Format(options.output), data, table, render.Table(GOAL_COLUMNS, (goal.cells(),)))
    return 0


def _run(env: dict[str, str]) -> float | None:
    """Return the seconds one command took; None when it did not show all devices."""
    start_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "hetero_llm.cli", "devices", "-o", "json"], env=env, capture_output=True, check=False
    )
    seconds = time.perf_counter() - start_s
    if done.returncode != 0:
        return None
    nodes = json.loads(done.stdout)["data"]["nodes"]
    return seconds if sum(len(node["devices"]) for node in nodes if node["kind"] == "ascend") == DEVICES else None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="runs; the slowest counts (9)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
