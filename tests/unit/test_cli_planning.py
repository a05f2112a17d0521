"""Several wishes become one plan, and a plan that does not fit becomes an error that helps."""

from dataclasses import replace

import pytest

from hetero_llm.cli.planning import (
    effective_wishes,
    infeasible,
    merge_plans,
    plan_request,
    plan_tables,
    rejection_text,
)
from hetero_llm.cli.requests import ModelRequest
from hetero_llm.model import (
    Device,
    Health,
    MemoryEstimate,
    ModelFacts,
    NodeInventory,
    Placement,
    Plan,
    PoolWish,
    Rejection,
    ReplicaPlan,
)
from hetero_llm.scheduler.resources import hold
from hetero_llm.scheduler.rules import KindRules

FACTS = ModelFacts(
    name="m", source="m", architecture="X", parameters=1, weights_bytes=1, layers=1, heads=1, kv_heads=1, head_dim=64,
    hidden_size=64, vocab_size=1, max_model_len=1, dtype="bfloat16",
)  # fmt: skip
MEMORY = MemoryEstimate(weights_bytes=1, kv_bytes=1, overhead_bytes=0, per_device_bytes=2)
NODE = NodeInventory(
    node="n",
    host="n",
    address="127.0.0.1",
    kind="cuda",
    devices=tuple(Device(kind="cuda", accelerator="X", uid=f"u{index}", index=index) for index in range(2)),
)
REFUSAL = Rejection(node="n", kind="cuda", accelerator="X", rule="memory", reason="80 GiB needed, 40 GiB free")


def first_free(wish, nodes):
    """A planner that takes the first free device."""
    free = [device.uid for node in nodes for device in node.devices if device.held_by is None]
    if not free:
        return Plan(model=FACTS, feasible=False, rejections=(REFUSAL,))
    replica = ReplicaPlan(
        id="m-cuda-1", kind="cuda", accelerator="X", tp=1, pp=1, placement=(Placement(node="n", devices=(free[0],)),),
        memory=MEMORY, kv_tokens=1, max_model_len=1, why="",
    )  # fmt: skip
    return Plan(model=FACTS, feasible=True, replicas=(replica,))


def merged(count):
    return merge_plans([PoolWish()] * count, [NODE], first_free)


def test_each_wish_finds_the_devices_of_the_earlier_ones_taken():
    assert [replica.placement[0].devices for replica in merged(2).replicas] == [("u0",), ("u1",)]


def test_replica_ids_are_unique_in_the_merged_plan():
    assert [replica.id for replica in merged(2).replicas] == ["m-cuda-1", "m-cuda-2"]


def test_a_merged_plan_fits_only_if_every_wish_fits():
    assert merged(2).feasible
    assert not merged(3).feasible
    assert len(merged(3).replicas) == 2


def test_the_same_refusal_is_listed_once():
    assert merged(4).rejections == (REFUSAL,)


def test_held_devices_name_their_replica():
    (node,) = hold([NODE], merged(1).replicas)
    assert [device.held_by for device in node.devices] == ["m-cuda-1", None]


REQUEST = ModelRequest(name=None, source="m", wishes=(PoolWish(kinds=("cuda",), tp=None, replicas=2),))


def test_a_plan_that_does_not_fit_names_the_wish_the_nearest_miss_and_what_would_fit():
    plan = replace(merged(3), alternatives=("--replicas 2 would fit",))
    report = infeasible(REQUEST, plan).report
    assert report.message == "m does not fit: 2 x tp=auto on cuda; 2 of the replicas have a place"
    assert report.cause == "n cuda X: 80 GiB needed, 40 GiB free (rule memory)"
    assert report.next[0] == "--replicas 2 would fit"


def test_nodes_refused_for_the_same_reason_share_a_row():
    names = ("a", "b", "c", "d", "e")
    alike = tuple(replace(REFUSAL, node=name) for name in names)
    _, refusals = plan_tables(Plan(model=FACTS, feasible=False, rejections=(*alike, replace(REFUSAL, rule="count"))))
    assert [row[0] for row in refusals.rows] == ["a, b, c and 2 more", "n"]


RULES = KindRules(native_resource=None, check=lambda facts, accelerator, wish: (), overhead_bytes=lambda *_: 0)


@pytest.mark.parametrize(
    ("flags", "fits"),
    [
        ((), False),
        (("--dtype", "float16"), True),
        (("--dtype=half",), True),
        (("--dtype", "half", "--dtype=bfloat16"), False),
        (("--dtype", "auto"), False),
    ],
)
def test_a_model_is_planned_in_the_dtype_the_engine_is_told_to_compute_in(flags, fits):
    device = Device(kind="ascend", accelerator="310P3", uid="u", index=0, memory_bytes=24 << 30, health=Health.OK)
    node = NodeInventory(node="n", host="n", address="127.0.0.1", kind="ascend", devices=(device,))
    request = ModelRequest(name=None, source="m", wishes=(PoolWish(),), engine_args=flags)
    plan = plan_request(request, replace(FACTS, max_model_len=1024), [node], {})
    assert plan.feasible == fits
    if not fits:
        (refused,) = plan.rejections
        assert (refused.rule, "-- --dtype float16 converts it" in refused.reason) == ("dtype", True)


def test_a_dtype_of_the_engine_does_not_change_the_size_of_32_bit_weights():
    request = ModelRequest(name=None, source="m", wishes=(PoolWish(),), engine_args=("--dtype", "float16"))
    facts = replace(FACTS, dtype="float32", max_model_len=1024)
    assert plan_request(request, facts, [NODE], {}).model.dtype == "float32"


@pytest.mark.parametrize("flags", [("--kv-cache-dtype", "fp8"), ("--kv-cache-dtype=auto", "--kv-cache-dtype=fp8_e4m3")])
def test_a_cache_type_among_the_engines_flags_is_planned_with(flags):
    sized = replace(NODE, devices=tuple(replace(one, memory_bytes=1 << 20, health=Health.OK) for one in NODE.devices))
    request = ModelRequest(name=None, source="m", wishes=(PoolWish(),))
    plain = plan_request(request, FACTS, [sized], {"cuda": RULES}).replicas[0]
    small = plan_request(replace(request, engine_args=flags), FACTS, [sized], {"cuda": RULES}).replicas[0]
    assert small.kv_tokens == pytest.approx(2 * plain.kv_tokens, rel=0.02)


def test_devices_in_use_lead_to_status_and_stop():
    busy = Plan(model=FACTS, feasible=False, rejections=(replace(REFUSAL, rule="in-use"),))
    assert "hetero-llm status" in infeasible(REQUEST, busy).report.next


@pytest.mark.parametrize(("node", "start"), [("*", "qpu: "), ("n", "n qpu: ")])
def test_stars_in_a_refusal_stand_for_all_and_are_not_shown(node, start):
    refusal = Rejection(node=node, kind="qpu", accelerator="*", rule="kind", reason="none here")
    assert rejection_text(refusal).startswith(start)


@pytest.mark.parametrize(
    ("engine_args", "dtype"),
    [
        ((), "fp8_e5m2"),
        (("--kv-cache-dtype", "fp8"), "fp8"),
        (("--kv-cache-dtype=auto", "--kv-cache-dtype=fp8", "--seed", "1"), "fp8"),
    ],
)
def test_the_cache_type_among_the_engines_flags_wins_over_that_of_the_wish(engine_args, dtype):
    request = ModelRequest(
        name=None, source="m", wishes=(PoolWish(kv_cache_dtype="fp8_e5m2"),) * 2, engine_args=engine_args
    )
    assert [wish.kv_cache_dtype for wish in effective_wishes(request)] == [dtype] * 2
