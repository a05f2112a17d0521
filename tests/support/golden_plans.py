"""Plans of the inventories in tests/samples/inventories as text, and the program that writes them down again.

``python tests/support/golden_plans.py`` rewrites tests/samples/inventories/plans. Read the difference first.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from checkpoint_headers import config_of, tensors_of
from plan_cases import CPU_RULES

from hetero_llm.inventory.node import load_inventory
from hetero_llm.matrix import parse_matrix
from hetero_llm.model import ModelFacts, Plan, PoolWish, Rejection, ReplicaPlan
from hetero_llm.models.aliases import ALIASES
from hetero_llm.models.facts import facts_of_tensors
from hetero_llm.models.geometry import read_geometry
from hetero_llm.scheduler.planner import make_plan
from hetero_llm.scheduler.text import gib

FOLDER = Path(__file__).parent.parent / "samples" / "inventories"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked of which inventory."""

    inventory: str
    model: str
    wish: PoolWish


CASES = {
    "mixed-7b-two-kinds": Case(
        inventory="mixed", model="qwen2.5-7b", wish=PoolWish(kinds=("ascend", "cuda"), tp=None, replicas=4)
    ),
    "mixed-7b-tp-auto": Case(inventory="mixed", model="qwen2.5-7b", wish=PoolWish(tp=None)),
    "mixed-7b-as-many-as-fit": Case(inventory="mixed", model="qwen2.5-7b", wish=PoolWish(replicas=None)),
    "mixed-7b-zone-west": Case(inventory="mixed", model="qwen2.5-7b", wish=PoolWish(labels={"zone": "west"})),
    "mixed-7b-tp-8-on-one-box": Case(
        inventory="mixed", model="qwen2.5-7b", wish=PoolWish(labels={"host": "gpu-a"}, tp=8)
    ),
    "mixed-72b-tp-4": Case(inventory="mixed", model="qwen2.5-72b", wish=PoolWish(tp=4)),
    "mixed-72b-too-many": Case(inventory="mixed", model="qwen2.5-72b", wish=PoolWish(tp=4, replicas=3)),
    "mixed-deepseek-nowhere": Case(inventory="mixed", model="deepseek-v3", wish=PoolWish(tp=None, pp=None)),
    "small-nodes-70b-over-nodes": Case(inventory="small-nodes", model="llama-3.1-70b", wish=PoolWish(tp=None, pp=None)),
    "small-nodes-70b-one-node": Case(inventory="small-nodes", model="llama-3.1-70b", wish=PoolWish(tp=None)),
    "two-and-two-72b-tp-4": Case(inventory="two-and-two", model="qwen2.5-72b", wish=PoolWish(tp=4)),
    "two-and-two-14b-tp-4": Case(inventory="two-and-two", model="qwen2.5-14b", wish=PoolWish(tp=4)),
    "a3-14b-pairs": Case(inventory="a3", model="qwen2.5-14b", wish=PoolWish(tp=2, replicas=None)),
    "a3-14b-half-a-card": Case(inventory="a3", model="qwen2.5-14b", wish=PoolWish(tp=1)),
    "recorded-cpu-demo": Case(
        inventory="recorded-cpu", model="smollm2-135m", wish=PoolWish(kinds=("cpu",), replicas=None)
    ),
}


def plan_text(case: Case) -> str:
    """Return the plan of `case` for people to read and compare."""
    matrix = parse_matrix((FOLDER / "matrix.yaml").read_text())
    nodes = load_inventory(FOLDER / f"{case.inventory}.json").nodes
    plan = make_plan(facts_of(case.model), case.wish, nodes, {"cpu": CPU_RULES}, matrix)
    return "\n".join(_lines(case, plan)) + "\n"


def facts_of(model: str) -> ModelFacts:
    """Return the facts of an alias or of a shape in tests/samples/models."""
    if model in ALIASES:
        return ALIASES[model].facts
    return facts_of_tensors(read_geometry(config_of(model), model), tensors_of(model), model, model)


def _lines(case: Case, plan: Plan) -> list[str]:
    default = PoolWish()
    asked = (f"{field.name}={getattr(case.wish, field.name)!r}" for field in dataclasses.fields(PoolWish))
    asked_for = [text for text in asked if text not in {f"{f.name}={getattr(default, f.name)!r}" for f in _fields()}]
    lines = [f"{case.model} on {case.inventory}: {', '.join(asked_for) or 'as it comes'}"]
    lines += ["feasible" if plan.feasible else "not feasible", ""]
    lines += [line for replica in plan.replicas for line in _replica_lines(replica)]
    lines += ["refused:", *map(_refusal_line, plan.rejections)]
    return lines + (["", "instead:", *plan.alternatives] if plan.alternatives else [])


def _fields() -> tuple[dataclasses.Field[object], ...]:
    return dataclasses.fields(PoolWish)


def _replica_lines(replica: ReplicaPlan) -> list[str]:
    memory = replica.memory
    return [
        f"{replica.id}  {replica.kind} {replica.accelerator}  TP {replica.tp} PP {replica.pp}",
        *(f"  {place.node}: {' '.join(place.devices)}" for place in replica.placement),
        f"  weights {gib(memory.weights_bytes)}, KV cache {gib(memory.kv_bytes)} ({replica.kv_tokens} tokens), "
        f"overhead {gib(memory.overhead_bytes)}",
        f"  {replica.why}",
        "",
    ]


def _refusal_line(item: Rejection) -> str:
    return f"{item.node} {item.kind} {item.accelerator}  {item.rule}: {item.reason}"


if __name__ == "__main__":
    for name, case in CASES.items():
        (FOLDER / "plans" / f"{name}.txt").write_text(plan_text(case))
