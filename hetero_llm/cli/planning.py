"""Plans for what was asked: the pure planner fed with this machine's plugins, one pool entry after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from hetero_llm.cli.render import Table, marked, size
from hetero_llm.cli.requests import ModelRequest
from hetero_llm.errors import PlanInfeasible
from hetero_llm.model import ModelFacts, NodeInventory, Plan, PoolWish, Rejection, ReplicaPlan
from hetero_llm.scheduler.resources import hold

if TYPE_CHECKING:
    from hetero_llm.plugin.manager import PluginManager
    from hetero_llm.scheduler.rules import KindRules

ANY = "*"
"""In a rejection: all nodes, kinds or accelerators."""

_KV_DTYPE_FLAG = "--kv-cache-dtype"
_DTYPE_FLAG = "--dtype"
_DTYPES = {"half": "float16", "float16": "float16", "bfloat16": "bfloat16"}
"""Values of `--dtype` that convert weights of 16 bits into others of 16 bits: not the size, but what computes them."""
_NODES_SHOWN = 3

PlanWish = Callable[[PoolWish, Sequence[NodeInventory]], Plan]


def kind_rules(manager: PluginManager) -> dict[str, KindRules]:
    """Return how the planner sees each loaded backend."""
    from hetero_llm.scheduler.rules import rules_of

    return {backend.kind: rules_of(backend) for backend in manager.backends()}


def plan_request(
    request: ModelRequest, facts: ModelFacts, nodes: Sequence[NodeInventory], rules: Mapping[str, KindRules]
) -> Plan:
    """Return one plan for all pool entries of a model; each entry finds the devices of the earlier ones taken."""
    from hetero_llm.matrix import load_matrix
    from hetero_llm.scheduler.planner import make_plan

    facts = replace(facts, name=request.name or facts.name)
    if facts.dtype in _DTYPES.values():
        facts = replace(facts, dtype=_DTYPES.get(_flag(request, _DTYPE_FLAG) or "", facts.dtype))
    matrix = load_matrix()
    return merge_plans(effective_wishes(request), nodes, lambda wish, free: make_plan(facts, wish, free, rules, matrix))


def effective_wishes(request: ModelRequest) -> tuple[PoolWish, ...]:
    """Return the wishes of `request` with what its engine flags decide: what is planned with, now and later."""
    kv_cache_dtype = _flag(request, _KV_DTYPE_FLAG)
    return tuple(replace(wish, kv_cache_dtype=kv_cache_dtype or wish.kv_cache_dtype) for wish in request.wishes)


def _flag(request: ModelRequest, name: str) -> str | None:
    """Return the value of an engine flag that decides what fits, where the last one wins; None when it is not given."""
    args = (*request.engine_args, "")
    values = [after if arg == name else arg.partition("=")[2] for arg, after in pairwise(args) if _is(arg, name)]
    return values[-1] if values else None


def _is(arg: str, name: str) -> bool:
    return arg == name or arg.startswith(f"{name}=")


def merge_plans(wishes: Sequence[PoolWish], nodes: Sequence[NodeInventory], plan_wish: PlanWish) -> Plan:
    """Plan `wishes` one after the other and return one plan, feasible only if all are."""
    plans: list[Plan] = []
    for wish in wishes:
        plans.append(plan_wish(wish, nodes))
        nodes = hold(nodes, plans[-1].replicas)
    replicas = _numbered(replica for plan in plans for replica in plan.replicas)
    rejections = tuple(rejection for plan in plans for rejection in plan.rejections)
    return replace(
        plans[0],
        feasible=all(plan.feasible for plan in plans),
        replicas=replicas,
        rejections=_distinct(rejections),
        alternatives=tuple(text for plan in plans for text in plan.alternatives),
    )


def _numbered(replicas: Iterable[ReplicaPlan]) -> tuple[ReplicaPlan, ...]:
    """Two pool entries of one kind both count from one; ids must be unique in the merged plan."""
    seen: Counter[str] = Counter()
    numbered = []
    for replica in replicas:
        stem, _, _ = replica.id.rpartition("-")
        seen[stem] += 1
        numbered.append(replace(replica, id=f"{stem}-{seen[stem]}"))
    return tuple(numbered)


def _distinct(rejections: Sequence[Rejection]) -> tuple[Rejection, ...]:
    return tuple(dict.fromkeys(rejections))


def infeasible(request: ModelRequest, plan: Plan) -> PlanInfeasible:
    """Return the error of a plan that does not fit, with the nearest miss as its cause."""
    nearest = plan.rejections[0] if plan.rejections else None
    wanted = ", ".join(_wish_text(wish) for wish in request.wishes)
    have = f"{len(plan.replicas)} of the replicas have a place" if plan.replicas else "no replica has a place"
    return PlanInfeasible(
        f"{plan.model.name} does not fit: {wanted}; {have}",
        cause=rejection_text(nearest) if nearest else "no device of a wanted kind was found",
        next=(*plan.alternatives, *_advice(nearest)),
    )


def rejection_text(rejection: Rejection) -> str:
    """Return a refusal in one line."""
    parts = (rejection.node, rejection.kind, rejection.accelerator)
    where = " ".join(part for part in parts if part not in ("", ANY)) or "any node"
    return f"{where}: {rejection.reason} (rule {rejection.rule})"


def _advice(nearest: Rejection | None) -> tuple[str, ...]:
    if nearest is not None and nearest.rule == "in-use":
        return ("hetero-llm status", "hetero-llm stop MODEL")
    return ("hetero-llm devices",)


def _wish_text(wish: PoolWish) -> str:
    count = "as many as fit" if wish.replicas is None else f"{wish.replicas} x"
    shape = f"tp={'auto' if wish.tp is None else wish.tp}" + (f" pp={wish.pp}" if wish.pp not in (None, 1) else "")
    return f"{count} {shape} on {' or '.join(wish.kinds) or 'any accelerator'}"


def plan_tables(plan: Plan) -> tuple[Table, Table]:
    """Return the replicas and the refusals as tables."""
    replicas = Table(
        ("replica", "kind", "accelerator", "tp", "pp", "node", "devices", "per device", "kv tokens", "why"),
        tuple(_replica_row(replica) for replica in plan.replicas),
        title=f"{plan.model.name}: {'feasible' if plan.feasible else 'not feasible'}",
        empty=f"{plan.model.name}: no replica has a place",
    )
    refusals = Table(
        ("node", "kind", "accelerator", "rule", "reason"),
        tuple(_refusal_row(list(alike)) for _, alike in groupby(plan.rejections, key=_but_for_the_node)),
        title="refused",
        empty="nothing was refused",
    )
    return replicas, refusals


def _but_for_the_node(item: Rejection) -> tuple[str, str, str, str]:
    return (item.kind, item.accelerator, item.rule, item.reason)


def _refusal_row(alike: Sequence[Rejection]) -> tuple[object, ...]:
    """Nodes that follow each other and are refused for the same reason share a row: a rack is one line, not forty."""
    more = len(alike) - _NODES_SHOWN
    nodes = ", ".join(item.node for item in alike[:_NODES_SHOWN]) + (f" and {more} more" if more > 0 else "")
    return (nodes, *_but_for_the_node(alike[0]))


def _replica_row(replica: ReplicaPlan) -> tuple[object, ...]:
    nodes = [place.node for place in replica.placement]
    devices = [uid for place in replica.placement for uid in place.devices]
    per_device = size(replica.memory.per_device_bytes)
    shape = (replica.tp, replica.pp)
    return (
        replica.id,
        replica.kind,
        marked(replica.accelerator, replica.simulated),
        *shape,
        nodes,
        devices,
        per_device,
        replica.kv_tokens,
        replica.why,
    )
