"""Placement cases, most of them field failures of other systems (P numbers in the team's case list)."""

import dataclasses

import pytest
from plan_cases import CPU_RULES, GIB, QWEN_7B, QWEN_32B, YI_34B, node

from hetero_llm.errors import PlanInfeasible, UsageError
from hetero_llm.matrix import load_matrix, parse_matrix
from hetero_llm.model import NodeInventory, Plan, PoolWish, Problem, Rejection
from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.planner import make_plan, require_feasible

SMOLLM2 = ALIASES["smollm2-135m"].facts
TWO_CPU_DEVICES = node("box", "cpu", "xeon-amx", 2, 11.5)
RULES = {"cpu": CPU_RULES}
PAIRED = parse_matrix("""
schema: 1
accelerators:
  - {kind: ascend, accelerator: 910C, vendor: Huawei, pairing: card, collective: hccl, dtypes: [bfloat16],
     features: [tp, pp], evidence: [{source: this test, date: 2026-12-01, level: reported}]}
""")
A3_WITH_ONE_DIE_HELD = node("a3", "ascend", "910C", 4, 64, per_card=2, held={1: "other"})


def plan(facts, wish, *nodes, rules=RULES) -> Plan:
    return make_plan(facts, wish, nodes, rules, load_matrix())


def only(rejections: tuple[Rejection, ...]) -> Rejection:
    (rejection,) = rejections
    return rejection


def test_two_replicas_take_different_devices():
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",), replicas=2), TWO_CPU_DEVICES)
    assert made.feasible
    assert [replica.id for replica in made.replicas] == ["smollm2-135m-cpu-1", "smollm2-135m-cpu-2"]
    assert [replica.placement[0].devices for replica in made.replicas] == [("box/0",), ("box/1",)]


def test_a_third_replica_on_two_devices_is_refused_by_count():
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",), replicas=3), TWO_CPU_DEVICES)
    assert not made.feasible
    assert only(made.rejections).rule == "count"
    assert only(made.rejections).reason == "2 devices here, 3 wanted for 3 replicas of TP 1"
    assert made.alternatives[0].startswith("--replicas 2 would fit")


def test_devices_of_running_replicas_are_refused_as_in_use():
    busy = node("box", "cpu", "xeon-amx", 2, 11.5, held={0: "a-1", 1: "a-2"})
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",)), busy)
    assert only(made.rejections).rule == "in-use"
    assert only(made.rejections).reason == "2 of 2 devices in use by a-1, a-2; 0 free, 1 wanted"


def test_the_demo_model_cannot_be_split_in_two():
    rejection = only(plan(SMOLLM2, PoolWish(kinds=("cpu",), tp=2), TWO_CPU_DEVICES).rejections)
    assert rejection.rule == "heads"
    assert "9 query heads and 3 KV heads, TP can be 1, 3" in rejection.reason


def test_cpu_replicas_get_a_modest_cache_rather_than_all_memory():
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",)), TWO_CPU_DEVICES)
    block_bytes = 128 * 23_040
    assert made.replicas[0].memory.kv_bytes == 4 * GIB // block_bytes * block_bytes


def test_a_cache_that_was_asked_for_is_taken_as_it_is():
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",), kv_cache_bytes=268_435_456), TWO_CPU_DEVICES)
    assert made.replicas[0].memory.kv_bytes == 268_435_456
    assert made.replicas[0].kv_tokens == 11_648


def test_a_cache_too_small_for_one_context_is_refused():
    rejection = only(plan(SMOLLM2, PoolWish(kinds=("cpu",), kv_cache_bytes=GIB // 16), TWO_CPU_DEVICES).rejections)
    assert rejection.rule == "memory"
    assert "0.06 GiB was asked for, one context of 8192 tokens needs 0.18 GiB" in rejection.reason


def test_p1_memory_decides_between_two_cards():
    small, big = node("a", "cuda", "A100-40GB", 1, 40), node("b", "cuda", "H100-80GB", 1, 80)
    made = plan(YI_34B, PoolWish(), small, big)
    assert made.replicas[0].placement[0].node == "b"
    assert only(made.rejections).rule == "memory"
    assert only(made.rejections).reason.startswith("TP 1 needs 67.09 GiB per device")
    assert only(made.rejections).reason.endswith("36.00 GiB of 40.00 GiB may be used (90%)")


def test_p5_cpu_is_never_chosen_silently():
    made = plan(SMOLLM2, PoolWish(), TWO_CPU_DEVICES)
    assert not made.feasible
    assert only(made.rejections).rule == "kind"
    assert made.alternatives == ("--kind cpu would fit: 1 replica of TP 1 on box (cpu xeon-amx)",)


def test_p5_cpu_stays_unused_beside_a_full_accelerator():
    made = plan(YI_34B, PoolWish(), node("a", "cuda", "A100-40GB", 1, 40), node("box", "cpu", "xeon-amx", 2, 500))
    assert not made.feasible
    assert [rejection.rule for rejection in made.rejections] == ["memory", "kind"]


def test_p6_pipeline_parallelism_is_refused_where_the_accelerator_has_none():
    facts = dataclasses.replace(SMOLLM2, dtype="float16")
    rejection = only(plan(facts, PoolWish(pp=2), node("n", "ascend", "310P3", 4, 24)).rejections)
    assert rejection.rule == "feature"
    assert "310P3 has no pipeline parallelism, pp 2 asked for" in rejection.reason


def test_a_backends_own_refusal_is_shown_with_the_node():
    own = Rejection(node="", kind="cpu", accelerator="xeon-amx", rule="feature", reason="head size 16")
    rules = {"cpu": dataclasses.replace(CPU_RULES, check=lambda facts, accelerator, wish: (own,))}
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",)), TWO_CPU_DEVICES, rules=rules)
    assert only(made.rejections) == dataclasses.replace(own, node="box")


def test_p7_automatic_tp_takes_what_the_heads_allow_and_says_why():
    made = plan(QWEN_7B, PoolWish(tp=None), node("a", "cuda", "H100-80GB", 8, 80))
    assert made.replicas[0].tp == 4
    assert "TP 8 does not divide 28 query heads" in made.replicas[0].why


def test_as_many_replicas_as_fit_get_the_smallest_groups():
    made = plan(QWEN_7B, PoolWish(tp=None, replicas=None), node("a", "cuda", "H100-80GB", 8, 80))
    assert [replica.tp for replica in made.replicas] == [1] * 8


def test_p8_the_kind_comes_from_the_devices():
    made = plan(QWEN_7B, PoolWish(), node("n", "ascend", "910B2", 2, 64))
    assert made.replicas[0].kind == "ascend"


def test_p11_four_devices_of_two_kinds_are_not_four_devices():
    nodes = node("gpu-a", "cuda", "H100-80GB", 2, 80), node("npu-b", "ascend", "910B2", 2, 64)
    made = plan(QWEN_32B, PoolWish(tp=4), *nodes)
    assert not made.feasible
    assert made.rejections[0].rule == "count"
    assert "no kind has 4 free on one node" in made.rejections[0].reason
    assert "ascend 2 on npu-b" in made.rejections[0].reason
    assert "cuda 2 on gpu-a" in made.rejections[0].reason
    assert made.alternatives == ("--tp 2 would fit: 1 replica on gpu-a (cuda H100-80GB) or npu-b (ascend 910B2)",)


def test_p14_the_nearest_node_comes_first_with_what_it_lacks():
    nodes = node("far", "cuda", "H100-80GB", 1, 80), node("near", "cuda", "H100-80GB", 3, 80)
    made = plan(QWEN_32B, PoolWish(tp=4), *nodes)
    named = [rejection for rejection in made.rejections if rejection.node != "*"]
    assert named[0].node == "near"
    assert named[0].reason == "3 devices here, 4 wanted for 1 replica of TP 4"


def test_p16_memory_that_others_use_does_not_count():
    rejection = only(plan(YI_34B, PoolWish(), node("a", "cuda", "H100-80GB", 1, 80, free_gib=10)).rejections)
    assert rejection.rule == "memory"
    assert rejection.reason.endswith("10.00 GiB of 80.00 GiB are free")


def test_failed_devices_are_not_used_and_named():
    made = plan(QWEN_32B, PoolWish(tp=4), node("a", "cuda", "H100-80GB", 4, 80, failed={2}))
    assert only(made.rejections).rule == "health"
    assert only(made.rejections).reason == "3 of 4 devices can be used, 4 wanted; device 2: failed"


def test_a_plan_that_fits_still_says_which_devices_it_avoids():
    made = plan(QWEN_7B, PoolWish(), node("a", "cuda", "H100-80GB", 2, 80, failed={0}))
    assert made.replicas[0].placement[0].devices == ("a/1",)
    assert only(made.rejections).rule == "health"


def test_a_node_that_does_not_answer_is_refused():
    assert only(plan(QWEN_7B, PoolWish(), node("a", "cuda", "H100-80GB", 2, 80, alive=False)).rejections).rule == "node"


def test_a_kind_that_is_nowhere_is_refused_by_name():
    made = plan(QWEN_7B, PoolWish(kinds=("ascend",)), node("a", "cuda", "H100-80GB", 2, 80))
    assert made.rejections[0].reason == "no node has ascend devices; there are: cuda"


def test_an_empty_cluster_gets_an_answer():
    assert plan(QWEN_7B, PoolWish()).rejections[0].rule == "kind"


def test_a_problem_instead_of_devices_is_passed_on():
    broken = NodeInventory(
        node="a",
        host="a",
        address="10.0.0.1",
        kind="cuda",
        problems=(Problem(kind="cuda", code="HL203", text="driver mismatch"),),
    )
    reasons = [rejection.reason for rejection in plan(QWEN_7B, PoolWish(), broken).rejections]
    assert "driver mismatch" in reasons


def test_a_longer_context_than_the_models_own_is_refused():
    rejection = only(plan(SMOLLM2, PoolWish(kinds=("cpu",), max_model_len=9000), TWO_CPU_DEVICES).rejections)
    assert rejection.rule == "feature"
    assert "9000" in rejection.reason
    assert "8192" in rejection.reason


def test_a_shorter_context_that_would_fit_is_offered():
    made = plan(QWEN_7B, PoolWish(), node("a", "cuda", "small", 1, 19))
    assert "a context of 16384 tokens (max_model_len) would fit" in made.alternatives[0]


def test_kinds_are_filled_in_the_order_asked():
    nodes = node("gpu", "cuda", "H100-80GB", 1, 80), node("npu", "ascend", "910B2", 1, 64)
    made = plan(QWEN_7B, PoolWish(kinds=("ascend", "cuda"), replicas=2), *nodes)
    assert [replica.kind for replica in made.replicas] == ["ascend", "cuda"]


def test_paired_dies_are_taken_by_whole_cards():
    made = make_plan(QWEN_7B, PoolWish(tp=2), [A3_WITH_ONE_DIE_HELD], {}, PAIRED)
    assert made.replicas[0].placement[0].devices == ("a3/2", "a3/3")


def test_half_a_card_is_refused_where_dies_are_paired():
    rejection = make_plan(QWEN_7B, PoolWish(tp=1), [A3_WITH_ONE_DIE_HELD], {}, PAIRED).rejections[0]
    assert rejection.rule == "pairing"
    assert "whole cards of 2 devices" in rejection.reason


def test_an_infeasible_plan_becomes_an_error_with_the_nearest_miss():
    made = plan(SMOLLM2, PoolWish(kinds=("cpu",), replicas=3), TWO_CPU_DEVICES)
    with pytest.raises(PlanInfeasible) as caught:
        require_feasible(made)
    assert caught.value.report.cause == "box (cpu xeon-amx): count: 2 devices here, 3 wanted for 3 replicas of TP 1"


@pytest.mark.parametrize("wish", [PoolWish(tp=0), PoolWish(replicas=0), PoolWish(gpu_memory_utilization=1.5)])
def test_numbers_out_of_range_are_refused(wish: PoolWish):
    with pytest.raises(UsageError):
        plan(SMOLLM2, wish, TWO_CPU_DEVICES)
