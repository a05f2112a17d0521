"""What a running model changes when nodes come and go. Pure: no Ray, no clock."""

from dataclasses import replace

import pytest

from hetero_llm.model import Device, Health, ModelFacts, NodeInventory, PoolWish
from hetero_llm.scheduler.reconcile import Pool, Situation, next_change, places_lacking, stranded

GIB = 1 << 30
FACTS = ModelFacts(
    name="m",
    source="m",
    architecture="X",
    parameters=1000,
    weights_bytes=GIB,
    layers=2,
    heads=8,
    kv_heads=8,
    head_dim=64,
    hidden_size=512,
    vocab_size=100,
    max_model_len=1024,
    dtype="bfloat16",
)


def node(name, kind="cuda", accelerator="H100-80GB", count=2, *, held=(), alive=True, health=Health.OK):
    devices = tuple(
        Device(
            kind=kind,
            accelerator=accelerator,
            uid=f"{name}-{index}",
            index=index,
            memory_bytes=80 * GIB,
            free_bytes=80 * GIB,
            health=health,
            held_by="somebody" if index in held else None,
        )
        for index in range(count)
    )
    return NodeInventory(node=name, host=name, address="10.0.0.1", kind=kind, devices=devices, alive=alive)


def pool(kind="cuda", accelerator="H100-80GB", *, wanted, living, tp=1, nodes=1, **counts):
    app = f"m-{kind}-{accelerator}-tp{tp}"
    shape = {"kind": kind, "accelerator": accelerator, "tp": tp, "pp": 1, "nodes": nodes}
    return Pool(app=app, **shape, wanted=wanted, living=living, **counts)


def situation(wishes, pools, nodes, others=()):
    return Situation(facts=FACTS, wishes=wishes, pools=pools, nodes=nodes, rules={}, matrix=None, others=others)


def change(wishes, pools, nodes, others=()):
    return next_change(situation(wishes, pools, nodes, others))


def test_nothing_changes_while_all_replicas_live():
    wish = PoolWish(kinds=("cuda",), replicas=2)
    assert change([wish], [pool(wanted=2, living=2)], [node("a", held=(0, 1))]) is None


def test_a_replica_whose_type_is_free_elsewhere_is_left_to_serve():
    wish = PoolWish(kinds=("cuda",), replicas=2)
    nodes = [node("a", alive=False, held=(0,)), node("b", held=(0,))]
    assert change([wish], [pool(wanted=2, living=1)], nodes) is None


def test_a_replica_without_a_place_moves_to_another_kind_that_was_allowed():
    wish = PoolWish(kinds=("cuda", "ascend"), replicas=1)
    nodes = [node("a", alive=False, held=(0,)), node("b", "ascend", "910B2")]
    found = change([wish], [pool(wanted=1, living=0)], nodes)
    assert found.counts == {"m-cuda-H100-80GB-tp1": 0}
    assert [(r.kind, r.placement[0].node) for r in found.replicas] == [("ascend", "b")]
    assert "H100-80GB" in found.reason


def test_a_replica_never_moves_to_a_kind_nobody_allowed():
    wish = PoolWish(kinds=("cuda",), replicas=1)
    nodes = [node("a", alive=False), node("b", "ascend", "910B2")]
    assert change([wish], [pool(wanted=1, living=0)], nodes) is None
    assert places_lacking([pool(wanted=1, living=0)], nodes) == {"m-cuda-H100-80GB-tp1": 1}


def test_only_those_without_a_place_move():
    wish = PoolWish(kinds=(), replicas=3)
    nodes = [node("a", alive=False, held=(0, 1)), node("b", held=(0,)), node("c", "ascend", "910B2", 4)]
    found = change([wish], [pool(wanted=4, living=1)], nodes)
    assert found.counts == {"m-cuda-H100-80GB-tp1": 2}
    assert len(found.replicas) == 2


def test_as_many_as_fit_grows_onto_a_new_node():
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    found = change([wish], [pool(wanted=2, living=2)], [node("a", held=(0, 1)), node("new")])
    assert [r.placement[0].node for r in found.replicas] == ["new", "new"]
    assert found.counts == {}


def test_as_many_as_fit_leaves_serve_the_devices_it_is_about_to_use():
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    assert change([wish], [pool(wanted=2, living=0)], [node("a")]) is None


def test_a_fixed_number_does_not_grow():
    wish = PoolWish(kinds=("cuda",), replicas=2)
    assert change([wish], [pool(wanted=2, living=2)], [node("a", held=(0, 1)), node("new")]) is None


@pytest.mark.parametrize("health", [Health.FAILED, Health.UNKNOWN])
def test_sick_devices_are_no_place(health):
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    assert change([wish], [pool(wanted=1, living=1)], [node("a", count=1, held=(0,)), node("b", health=health)]) is None


def test_a_group_over_nodes_needs_a_share_on_each():
    pools = [pool(wanted=1, living=0, tp=4, nodes=2)]
    assert places_lacking(pools, [node("a"), node("b")]) == {}
    assert places_lacking(pools, [node("a", count=4)]) == {"m-cuda-H100-80GB-tp4": 1}
    assert places_lacking(pools, [node("a"), node("b", held=(0,))]) == {"m-cuda-H100-80GB-tp4": 1}


def test_the_same_input_gives_the_same_change_in_any_order_of_nodes():
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    nodes = [node("a", held=(0, 1)), node("b"), node("c")]
    pools = [pool(wanted=2, living=2)]
    assert change([wish], pools, nodes) == change([wish], pools, nodes[::-1])


def test_a_node_without_the_label_that_was_asked_for_is_no_place():
    wish = PoolWish(kinds=("cuda",), replicas=1, labels={"rack": "7"})
    labelled = replace(pool(wanted=1, living=0), labels={"rack": "7"})
    other, right = node("a"), replace(node("b"), labels={"rack": "7"})
    assert places_lacking([labelled], [other]) == {labelled.app: 1}
    assert places_lacking([labelled], [other, right]) == {}
    assert change([wish], [labelled], [other]) is None


def test_two_rounds_of_growth_do_not_ask_for_the_same_device_twice():
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    nodes = [node("a", held=(0, 1)), node("new")]
    assert change([wish], [pool(wanted=4, living=2)], nodes) is None
    assert change([replace(wish, replicas=4)], [pool(wanted=4, living=2)], nodes) is None


def test_what_another_model_gets_back_is_not_taken_from_it():
    wish = PoolWish(kinds=("cuda",), replicas=None, tp=1)
    nodes = [node("a", held=(0,))]
    crashed = pool(wanted=1, living=0)
    assert change([wish], [pool(wanted=1, living=1)], nodes, others=[crashed]) is None
    assert change([wish], [pool(wanted=1, living=1)], nodes) is not None


def test_a_replica_does_not_move_onto_what_a_pool_of_its_own_model_gets_back():
    wish = PoolWish(kinds=("cuda", "ascend"), replicas=2)
    nodes = [node("a", alive=False), node("b", "ascend", "910B2", 1)]
    pools = [pool(wanted=1, living=0), pool("ascend", "910B2", wanted=1, living=0)]
    assert change([wish], pools, nodes) is None


ANY = PoolWish(kinds=("cuda", "ascend"), replicas=1)
GPUS, NPUS = "m-cuda-H100-80GB-tp1", "m-ascend-910B2-tp1"


def test_a_leaving_nodes_replica_with_an_equal_place_is_left_to_serve():
    pools = [pool(wanted=1, living=1, leaving=1)]
    assert change([ANY], pools, [node("a", held=(0, 1)), node("b"), node("c", "ascend", "910B2")]) is None


def test_a_leaving_nodes_replica_gets_its_successor_on_another_kind_before_anything_is_taken_away():
    pools = [pool(wanted=1, living=1, leaving=1)]
    found = change([ANY], pools, [node("a", held=(0, 1)), node("c", "ascend", "910B2")])
    assert [(r.kind, r.placement[0].node) for r in found.replicas] == [("ascend", "c")]
    assert (found.counts, found.retiring) == ({}, {GPUS: 1})


def successor(**counts):
    return pool("ascend", "910B2", wanted=1, succeeds=True, **counts)


def test_nothing_more_happens_until_the_successor_is_ready():
    nodes = [node("a", held=(0, 1)), node("c", "ascend", "910B2", held=(0,))]
    leaving = pool(wanted=1, living=1, leaving=1, retiring=1)
    assert change([ANY], [leaving, successor(living=0)], nodes) is None
    assert change([ANY], [leaving, successor(living=1)], nodes) is None
    found = change([ANY], [leaving, successor(living=1, ready=1)], nodes)
    assert (found.counts, found.retiring, found.replicas) == ({GPUS: 0}, {GPUS: 0}, ())


def test_a_replica_stays_while_its_successor_has_lost_its_place():
    leaving = pool(wanted=1, living=1, leaving=1, retiring=1)
    nodes = [node("a", held=(0, 1)), node("c", "ascend", "910B2", alive=False)]
    assert change([ANY], [leaving, successor(living=0)], nodes) is None
    elsewhere = PoolWish(kinds=("cuda", "ascend", "cpu"), replicas=1)
    found = change([elsewhere], [leaving, successor(living=0)], [*nodes, node("d", "cpu", "avx512")])
    assert (found.counts, [r.kind for r in found.replicas]) == ({NPUS: 0}, ["cpu"])


def test_a_replica_that_serve_moved_after_all_is_no_successor():
    moved = pool(wanted=1, living=1, ready=1, retiring=1)
    nodes = [node("b", held=(0,)), node("c", "ascend", "910B2", held=(0,))]
    assert change([ANY], [moved, successor(living=1)], nodes) is None
    assert change([ANY], [moved, successor(living=1, ready=1)], nodes).counts == {GPUS: 0}


def test_another_replica_that_nobody_can_place_does_not_hold_up_the_move():
    nodes = [node("a", held=(0, 1)), node("c", "ascend", "910B2", 1, held=(0,))]
    pools = [
        pool(wanted=1, living=1, leaving=1, retiring=1),
        successor(living=1, ready=1),
        pool("cpu", "avx512", wanted=1, living=0),
    ]
    assert change([ANY], pools, nodes).counts == {GPUS: 0}


def test_a_replica_that_died_before_its_successor_was_ready_is_not_brought_back():
    nodes = [node("c", "ascend", "910B2", held=(0,)), node("d")]
    pools = [pool(wanted=1, living=0, retiring=1), successor(living=1)]
    assert change([ANY], pools, nodes).counts == {GPUS: 0}


def test_of_two_replicas_one_lost_and_one_leaving_both_get_successors_and_only_the_lost_one_is_given_up():
    wish = PoolWish(kinds=("cuda", "ascend"), replicas=2)
    found = change(
        [wish], [pool(wanted=2, living=1, leaving=1)], [node("a", held=(0, 1)), node("c", "ascend", "910B2")]
    )
    assert len(found.replicas) == 2
    assert (found.counts, found.retiring) == ({GPUS: 1}, {GPUS: 1})


def left_behind(wishes, pools, nodes):
    return stranded(situation(wishes, pools, nodes))


def test_stranded_are_those_that_fit_on_nothing_that_was_allowed():
    pools = [pool(wanted=1, living=1, leaving=1), pool("ascend", "910B2", wanted=2, living=2, leaving=2)]
    nodes = [node("a", held=(0, 1)), node("b", "ascend", "910B2", held=(0, 1))]
    wishes = [PoolWish(kinds=("cuda", "cpu"), replicas=1), PoolWish(kinds=("ascend", "cpu"), replicas=2)]
    assert left_behind(wishes, pools, nodes) == {GPUS: 1, NPUS: 2}
    assert left_behind(wishes, pools, [*nodes, node("c", "cpu", "avx512", 2)]) == {NPUS: 1}
    assert left_behind(wishes, pools, [*nodes, node("c", "cpu", "avx512", 3)]) == {}
