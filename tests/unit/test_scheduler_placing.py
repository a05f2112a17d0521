"""Where replicas go when there is a choice: hosts in turn, linked devices together, several nodes only when needed."""

import dataclasses

from plan_cases import GIB, QWEN_7B, QWEN_32B, model, node

from hetero_llm.matrix import parse_matrix
from hetero_llm.model import Plan, PoolWish, Rejection
from hetero_llm.scheduler.planner import make_plan
from hetero_llm.scheduler.rules import KindRules

LLAMA_405B = model(
    "llama-405b", 405_853_388_800, heads=128, kv_heads=8, layers=126, width=53_248, context=8192
)  # fmt: skip
MATRIX = parse_matrix("""
schema: 1
accelerators:
  - {kind: cuda, accelerator: fast, vendor: NVIDIA, memory_bandwidth_bytes_per_s: 3_000_000_000_000, collective: nccl,
     dtypes: [bfloat16], features: [tp, pp], evidence: [{source: this test, date: 2026-12-01, level: reported}]}
  - {kind: ascend, accelerator: 910C, vendor: Huawei, pairing: card, collective: hccl, dtypes: [bfloat16],
     features: [tp, pp], evidence: [{source: this test, date: 2026-12-01, level: reported}]}
  - {kind: ascend, accelerator: 310P3, vendor: Huawei, collective: hccl, dtypes: [bfloat16],
     features: [tp], evidence: [{source: this test, date: 2026-12-01, level: reported}]}
""")


def plan(facts, wish, *nodes, matrix=MATRIX) -> Plan:
    return make_plan(facts, wish, nodes, {}, matrix)


def places(made: Plan) -> list[tuple[str, ...]]:
    """The nodes of each replica."""
    return [tuple(place.node for place in replica.placement) for replica in made.replicas]


def devices(made: Plan, replica: int = 0) -> list[tuple[str, ...]]:
    return [place.devices for place in made.replicas[replica].placement]


# -- Hosts ------------------------------------------------------------------------------------------------------------


def test_replicas_are_spread_over_hosts():
    nodes = [node(name, "cuda", "H100-80GB", 8, 80) for name in "abc"]
    made = plan(QWEN_7B, PoolWish(replicas=3), *nodes)
    assert sorted(places(made)) == [("a",), ("b",), ("c",)]


def test_a_full_host_does_not_stop_the_others_from_taking_more():
    nodes = node("a", "cuda", "H100-80GB", 1, 80), node("b", "cuda", "H100-80GB", 8, 80)
    made = plan(QWEN_7B, PoolWish(replicas=4), *nodes)
    assert sorted(places(made)) == [("a",), ("b",), ("b",), ("b",)]


def test_two_nodes_of_one_box_count_as_one_host():
    box = [node(name, "cuda", "H100-80GB", 4, 80, host="box") for name in ("box-1", "box-2")]
    made = plan(QWEN_7B, PoolWish(replicas=2), *box, node("other", "cuda", "H100-80GB", 4, 80))
    assert sorted(places(made)) == [("box-1",), ("other",)]


def test_replicas_of_one_accelerator_get_one_shape_where_that_is_possible():
    nodes = [node(name, "cuda", "H100-80GB", 8, 80) for name in "ab"]
    made = plan(QWEN_7B, PoolWish(tp=None, replicas=5), *nodes)
    assert {replica.tp for replica in made.replicas} == {2}


def test_a_preferred_kind_is_filled_on_all_its_hosts_before_the_next():
    nodes = [node(name, "ascend", "910B2", 1, 64) for name in ("npu-a", "npu-b")]
    made = plan(
        QWEN_7B, PoolWish(kinds=("ascend", "cuda"), replicas=3), *nodes, node("gpu", "cuda", "H100-80GB", 8, 80)
    )
    assert [replica.kind for replica in made.replicas] == ["ascend", "ascend", "cuda"]


def test_of_one_kind_the_faster_accelerator_comes_first():
    nodes = node("a", "cuda", "unlisted", 8, 80), node("b", "cuda", "fast", 1, 80)
    made = plan(QWEN_7B, PoolWish(replicas=2), *nodes)
    assert places(made) == [("b",), ("a",)]


def test_p12_as_many_as_fit_is_bounded_by_what_there_is():
    made = plan(QWEN_7B, PoolWish(replicas=None), node("a", "cuda", "H100-80GB", 3, 80, held={0: "other"}))
    assert made.feasible
    assert len(made.replicas) == 2


def test_p12_more_than_there_is_names_how_many_would_fit():
    made = plan(QWEN_7B, PoolWish(replicas=9), *[node(name, "cuda", "H100-80GB", 3, 80) for name in "ab"])
    assert not made.feasible
    assert len(made.replicas) == 6
    assert made.alternatives[0].startswith("--replicas 6 would fit")


def test_a_kind_that_nobody_asked_for_is_offered_when_it_would_fit():
    nodes = node("a", "cuda", "H100-80GB", 1, 10), node("b", "ascend", "910B2", 1, 64)
    made = plan(QWEN_7B, PoolWish(kinds=("cuda",)), *nodes)
    assert "--kind ascend would fit: 1 replica of TP 1 on b (ascend 910B2)" in made.alternatives


# -- Islands ----------------------------------------------------------------------------------------------------------


def test_a_group_stays_in_one_nvlink_island():
    a = node("a", "cuda", "H100-80GB", 4, 80, islands=[{0, 2}, {1, 3}])
    assert devices(plan(QWEN_32B, PoolWish(tp=2), a)) == [("a/0", "a/2")]


def test_a_small_island_is_used_before_a_large_one_is_broken():
    a = node("a", "cuda", "H100-80GB", 6, 80, islands=[{0, 1, 2, 3}, {4, 5}])
    assert devices(plan(QWEN_32B, PoolWish(tp=2), a)) == [("a/4", "a/5")]


def test_pcie_is_no_island():
    a = node("a", "cuda", "H100-80GB", 4, 80, islands=[{0, 2}], link="PIX")
    assert devices(plan(QWEN_32B, PoolWish(tp=2), a)) == [("a/0", "a/1")]


def test_what_is_left_of_two_islands_is_combined_last():
    a = node("a", "cuda", "H100-80GB", 6, 80, islands=[{0, 1, 2}, {3, 4, 5}])
    made = plan(QWEN_32B, PoolWish(tp=2, replicas=3), a)
    assert [devices(made, replica)[0] for replica in range(3)] == [("a/0", "a/1"), ("a/3", "a/4"), ("a/2", "a/5")]


def test_within_an_island_devices_of_one_numa_node_stand_together():
    a = node("a", "ascend", "910B2", 4, 64, islands=[{0, 1, 2, 3}], link="hccs", numa=[0, 1, 1, 0])
    made = plan(QWEN_32B, PoolWish(tp=2, replicas=2), a)
    assert [devices(made, replica)[0] for replica in range(2)] == [("a/0", "a/3"), ("a/1", "a/2")]


def test_a_held_device_does_not_take_its_neighbours_out_of_the_island():
    a = node("a", "cuda", "H100-80GB", 4, 80, islands=[{0, 1}, {1, 2}], held={1: "other"})
    assert devices(plan(QWEN_32B, PoolWish(tp=2), a)) == [("a/0", "a/2")]


# -- Several nodes ----------------------------------------------------------------------------------------------------


def test_a_model_too_large_for_a_node_becomes_a_pipeline_of_whole_nodes():
    nodes = [node(name, "cuda", "H100-80GB", 8, 80) for name in "ab"]
    made = plan(LLAMA_405B, PoolWish(tp=None, pp=None), *nodes)
    (replica,) = made.replicas
    assert (replica.tp, replica.pp) == (8, 2)
    assert devices(made) == [tuple(f"a/{i}" for i in range(8)), tuple(f"b/{i}" for i in range(8))]
    assert "over 2 nodes, 8 devices of each" in replica.why


def test_a_group_that_fits_on_one_node_never_spans_two():
    nodes = [node(name, "cuda", "H100-80GB", 4, 80) for name in "ab"]
    assert places(plan(QWEN_32B, PoolWish(tp=2, pp=2), *nodes)) == [("a",)]


def test_a_pipeline_that_was_asked_for_goes_over_nodes_when_one_is_too_small():
    nodes = [node(name, "cuda", "H100-80GB", 2, 80) for name in "ab"]
    made = plan(QWEN_32B, PoolWish(tp=2, pp=2), *nodes)
    assert devices(made) == [("a/0", "a/1"), ("b/0", "b/1")]


def test_a_tp_that_was_asked_for_goes_over_nodes_when_one_is_too_small():
    nodes = [node(name, "cuda", "H100-80GB", 1, 80) for name in "ab"]
    made = plan(QWEN_32B, PoolWish(tp=2), *nodes)
    assert devices(made) == [("a/0",), ("b/0",)]


def test_a_tp_that_is_chosen_never_leaves_its_node():
    nodes = [node(name, "cuda", "A100-40GB", 1, 40) for name in "ab"]
    made = plan(dataclasses.replace(QWEN_32B, max_model_len=8192), PoolWish(tp=None), *nodes)
    assert not made.feasible
    assert made.rejections[0].rule == "memory"
    assert made.alternatives[0] == (
        "--tp 1 --pp 2 would fit: 1 replica of TP 1 x PP 2, each over 2 nodes: a, b (cuda A100-40GB)"
    )


def test_fewer_replicas_over_nodes_are_offered_when_not_all_fit():
    nodes = [node(name, "cuda", "A100-40GB", 1, 40) for name in "abc"]
    made = plan(dataclasses.replace(QWEN_32B, max_model_len=8192), PoolWish(replicas=2), *nodes)
    assert made.alternatives[0].startswith("--tp 1 --pp 2 --replicas 1 would fit: 1 replica of TP 1 x PP 2")


def test_the_shape_that_is_offered_is_one_for_all_replicas():
    facts = dataclasses.replace(QWEN_32B, max_model_len=8192)
    # The one takes TP 1, the other only TP 2: with flags both replicas have the same.
    nodes = node("a", "cuda", "H100-80GB", 1, 80), node("b", "ascend", "910B2", 2, 40)
    made = plan(facts, PoolWish(tp=None, pp=3, replicas=2), *nodes)
    (offered,) = (text for text in made.alternatives if text.startswith("--tp"))
    assert offered == "--tp 2 --pp 1 --replicas 1 would fit: 1 replica of TP 2 on b (ascend 910B2)"
    assert plan(facts, PoolWish(tp=2, pp=1, replicas=1), *nodes).feasible


def test_a_group_never_spans_kinds_or_accelerators():
    nodes = [
        node("a", "cuda", "H100-80GB", 2, 80),
        node("b", "ascend", "910B2", 2, 80),
        node("c", "cuda", "A100-80GB", 2, 80),
    ]
    assert not plan(QWEN_32B, PoolWish(tp=4), *nodes).feasible


def test_a_group_never_spans_engines_of_two_versions():
    nodes = [node(name, "cuda", "H100-80GB", 2, 80, vllm=vllm) for name, vllm in (("a", "0.23.0"), ("b", "0.24.0"))]
    assert not plan(QWEN_32B, PoolWish(tp=4), *nodes).feasible
    third = node("c", "cuda", "H100-80GB", 2, 80, vllm="0.24.0")
    assert places(plan(QWEN_32B, PoolWish(tp=4), *nodes, third)) == [("b", "c")]


def test_every_node_of_a_group_gives_the_same_number_of_devices():
    nodes = node("a", "cuda", "H100-80GB", 3, 80), node("b", "cuda", "H100-80GB", 1, 80)
    assert not plan(QWEN_32B, PoolWish(tp=4), *nodes).feasible


def test_several_groups_share_nodes_without_sharing_devices():
    nodes = [node(name, "cuda", "H100-80GB", count, 80) for name, count in (("a", 3), ("b", 2), ("c", 1))]
    made = plan(QWEN_32B, PoolWish(tp=1, pp=2, replicas=3), *nodes)
    used = [uid for replica in made.replicas for place in replica.placement for uid in place.devices]
    assert made.feasible
    assert len(set(used)) == len(used) == 6


def test_a_kind_without_pipelines_forms_none_over_nodes():
    facts = dataclasses.replace(QWEN_32B, max_model_len=2048)
    nodes = [node(name, "ascend", "310P3", 2, 24) for name in "abcd"]
    assert not plan(facts, PoolWish(tp=None, pp=None), *nodes).feasible


def test_the_tightest_device_of_all_nodes_sets_the_cache():
    roomy, tight = node("a", "cuda", "H100-80GB", 2, 80), node("b", "cuda", "H100-80GB", 2, 80, free_gib=50)
    (replica,) = plan(QWEN_32B, PoolWish(tp=2, pp=2), roomy, tight).replicas
    assert replica.memory.per_device_bytes <= 50 * GIB


def test_paired_dies_stay_together_in_groups_over_nodes():
    nodes = [node(name, "ascend", "910C", 4, 64, per_card=2, held={0: "other"}) for name in "ab"]
    made = plan(QWEN_32B, PoolWish(tp=2, pp=2), *nodes)
    assert devices(made) == [("a/2", "a/3"), ("b/2", "b/3")]


# -- Labels and versions ----------------------------------------------------------------------------------------------


def test_a_label_that_was_asked_for_decides():
    nodes = [node(name, "cuda", "H100-80GB", 1, 80, labels={"zone": name}) for name in "ab"]
    made = plan(QWEN_7B, PoolWish(labels={"zone": "b"}), *nodes)
    assert places(made) == [("b",)]
    assert [(item.node, item.rule, item.reason) for item in made.rejections] == [
        ("a", "label", "zone=b was asked for, the node has zone=a")
    ]


def test_the_clusters_own_labels_can_be_asked_for_without_prefix():
    nodes = [node(name, "cuda", "H100-80GB", 1, 80, host=f"box-{name}") for name in "ab"]
    assert places(plan(QWEN_7B, PoolWish(labels={"host": "box-b"}), *nodes)) == [("b",)]


def test_a_label_the_node_lacks_is_named():
    made = plan(QWEN_7B, PoolWish(labels={"zone": "b"}), node("a", "cuda", "H100-80GB", 1, 80))
    assert made.rejections[0].reason == "zone=b was asked for, the node has no label zone"


# -- what a kind itself refuses -------------------------------------------------------------------------------------


def one_rank_only(facts, accelerator, wish):
    if (wish.tp or 1) * (wish.pp or 1) == 1:
        return ()
    reason = "its instances cannot reach each other"
    return (Rejection(node="", kind="cuda", accelerator=accelerator, rule="feature", reason=reason),)


ALONE = KindRules(native_resource="GPU", check=one_rank_only, overhead_bytes=lambda *_: 0)


def test_a_shape_that_is_chosen_is_one_the_kind_would_take():
    slices = node("a", "cuda", "A100-MIG-3g.20gb", 4, 20)
    made = make_plan(QWEN_7B, PoolWish(kinds=("cuda",), tp=None, pp=None), [slices], {"cuda": ALONE}, None)
    assert [(replica.tp, replica.pp) for replica in made.replicas] == [(1, 1)]


def test_a_shape_the_kind_does_not_take_is_refused_with_its_reason():
    slices = node("a", "cuda", "A100-MIG-3g.20gb", 4, 20)
    made = make_plan(QWEN_7B, PoolWish(kinds=("cuda",), tp=2), [slices], {"cuda": ALONE}, None)
    assert not made.feasible
    assert [(refusal.rule, refusal.reason) for refusal in made.rejections] == [
        ("feature", "its instances cannot reach each other")
    ]


def test_a_kind_whose_engines_stay_on_one_node_forms_no_group_over_two():
    stays = dataclasses.replace(ALONE, check=lambda *_: (), spans_nodes=False)
    nodes = [node(name, "cuda", "X", 1, 40) for name in "ab"]
    wish = PoolWish(kinds=("cuda",), tp=2)
    assert make_plan(QWEN_7B, wish, nodes, {"cuda": dataclasses.replace(stays, spans_nodes=True)}, None).feasible
    assert not make_plan(QWEN_7B, wish, nodes, {"cuda": stays}, None).feasible
