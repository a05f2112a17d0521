"""Time and memory of planning on a large cluster. Run with ``python -m benchmarks.planner [--nodes N] [-o json]``.

The cluster is composed: two thirds NVIDIA, one third Ascend, eight devices a node, some held, some failed, no two with
the same free memory, so that nothing can be computed once for all. Each case runs several times; the slowest counts.
Memory is the peak of the whole process, interpreter and inventory included.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Mapping, Sequence

from benchmarks.report import GOAL_COLUMNS, Goal, load_average, machine, machine_lines, number
from hetero_llm.cli import render
from hetero_llm.cli.planning import kind_rules
from hetero_llm.matrix import load_matrix
from hetero_llm.model import Device, Health, ModelFacts, NodeInventory, Plan, PoolWish
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.scheduler.planner import make_plan
from hetero_llm.scheduler.rules import KindRules

GIB = 1 << 30
DEVICES = 8
LIMIT_S = 1.0
LIMIT_MB = 200.0

QWEN_72B = ModelFacts(
    name="qwen2.5-72b",
    source="qwen2.5-72b",
    architecture="Qwen2ForCausalLM",
    parameters=72_706_203_648,
    weights_bytes=145_412_407_296,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    hidden_size=8192,
    intermediate_size=29_568,
    vocab_size=152_064,
    max_model_len=32_768,
    dtype="bfloat16",
)

WISHES: Mapping[str, PoolWish] = {
    "one replica, TP 4": PoolWish(tp=4),
    "one replica, TP auto": PoolWish(tp=None),
    "100 replicas, TP auto, two kinds": PoolWish(kinds=("ascend", "cuda"), tp=None, replicas=100),
    "as many as fit, TP and PP auto": PoolWish(tp=None, pp=None, replicas=None),
    "over nodes: TP 8, PP 4": PoolWish(tp=8, pp=4, replicas=10),
    "too many: 10,000 replicas": PoolWish(tp=None, replicas=10_000),
    "impossible: an accelerator nobody has": PoolWish(accelerator="H900"),
    "impossible: TP 64 x PP 80": PoolWish(tp=64, pp=80, replicas=2),
    "impossible: cache of 1 TiB": PoolWish(tp=None, pp=None, kv_cache_bytes=1 << 40),
}


def main() -> int:
    """Measure and print; always 0."""
    options = _options()
    about, before = machine(), load_average()
    nodes = cluster(options.nodes)
    rules = kind_rules(load_plugins())
    rows = [(name, *_measure(wish, nodes, rules, options.repeats)) for name, wish in WISHES.items()]
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    slowest = max(seconds for _, seconds, _ in rows)
    goals = (
        Goal(name="slowest plan, s", value=slowest, limit=LIMIT_S),
        Goal(name="peak memory, MB", value=peak_mb, limit=LIMIT_MB),
    )
    if options.output == "table":
        for text in machine_lines(about, before, load_average()):
            render.line(text)
        render.line()
    data = {
        "machine": about,
        "nodes": options.nodes,
        "plans": [{"name": name, "s": seconds, "replicas": len(plan.replicas)} for name, seconds, plan in rows],
        "goals": [goal.data() for goal in goals],
    }
    cells = tuple(
        (name, number(seconds), plan.feasible, len(plan.replicas), len(plan.rejections)) for name, seconds, plan in rows
    )
    title = f"{options.nodes} nodes x {DEVICES} devices"
    columns = ("wish", "slowest, s", "feasible", "replicas", "refusals")
    goal_table = render.Table(GOAL_COLUMNS, tuple(goal.cells() for goal in goals))
    render.show(render.Format(options.output), data, render.Table(columns, cells, title=title), goal_table)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000, metavar="N", help="nodes of eight devices (1000)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs per case, the slowest counts (3)")
    parser.add_argument("-o", "--output", choices=["table", "json"], default="table")
    return parser.parse_args()


def _measure(
    wish: PoolWish, nodes: Sequence[NodeInventory], rules: Mapping[str, KindRules], repeats: int
) -> tuple[float, Plan]:
    taken_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        plan = make_plan(QWEN_72B, wish, nodes, rules, load_matrix())
        taken_s.append(time.perf_counter() - start_s)
    return max(taken_s), plan


def cluster(nodes: int) -> tuple[NodeInventory, ...]:
    """Return `nodes` nodes, the same ones each time."""
    chance = random.Random(5)
    return tuple(_node(number, chance) for number in range(nodes))


def _node(number: int, chance: random.Random) -> NodeInventory:
    kind, accelerator, memory_bytes = (
        ("ascend", "910B2", 64 * GIB) if number % 3 == 0 else ("cuda", "H100-80GB", 80 * GIB)
    )
    name = f"{kind}-{number:04}"
    devices = tuple(_device(name, kind, accelerator, memory_bytes, index, chance) for index in range(DEVICES))
    versions = {"driver": "1", "vllm": "0.23.0", "plugin": "0.23.0" if kind == "ascend" else None}
    return NodeInventory(node=name, host=name, address="10.0.0.1", kind=kind, versions=versions, devices=devices)


def _device(name: str, kind: str, accelerator: str, memory_bytes: int, index: int, chance: random.Random) -> Device:
    return Device(
        kind=kind,
        accelerator=accelerator,
        uid=f"{name}/{index}",
        index=index,
        memory_bytes=memory_bytes,
        free_bytes=memory_bytes - chance.randrange(4 * GIB),
        health=Health.FAILED if chance.random() < 0.01 else Health.OK,
        numa=index // 4,
        links={str(peer): "nvlink" for peer in range(DEVICES) if peer != index},
        held_by="other-1" if chance.random() < 0.05 else None,
    )


if __name__ == "__main__":
    raise SystemExit(main())
