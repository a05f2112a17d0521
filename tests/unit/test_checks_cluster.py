"""What the doctor says of a cluster; the nodes' answers are the input."""

import pytest

from hetero_llm.cli.checks_cluster import (
    check_addresses,
    check_answers,
    check_clocks,
    check_counts,
    check_same,
    cluster_checks,
)
from hetero_llm.cluster.doctor import NodeAnswer
from hetero_llm.model import Device, Health, NodeInventory


def inventory(name, host="h1", address="10.0.0.1", health=(Health.OK, Health.OK), alive=True):
    devices = tuple(
        Device(kind="toy", accelerator="T1", uid=f"{name}-{index}", index=index, health=state)
        for index, state in enumerate(health)
    )
    return NodeInventory(node=name, host=host, address=address, kind="toy", devices=devices, alive=alive)


def answer(name="a", node=None, **changes):
    settings = {
        "node": name,
        "inventory": node or inventory(name),
        "resources": {"hetero_toy": 2.0, "hetero_toy:T1": 2.0, "TPU": 2.0, "memory": 1e9},
        "ray_version": "2.60.0",
        "python_version": "3.11.7",
        "clock_offset_s": 0.1,
        "clock_error_s": 0.2,
    }
    return NodeAnswer(**(settings | changes))


def test_a_cluster_whose_nodes_agree_passes_everything():
    checks = cluster_checks((answer("a"), answer("b")), {"toy": "TPU"})
    assert [check.ok for check in checks] == [True] * 7
    assert {"a.count", "b.count"} < {check.name for check in checks}


def test_a_node_that_does_not_answer_fails_by_name_with_the_reason():
    check = check_answers((answer("a"), answer("b", error="no answer within 60 s")))
    assert (check.ok, check.text) == (False, "b: no answer within 60 s")


def test_a_node_that_was_started_by_other_means_is_found():
    foreign = NodeAnswer(node="plain", inventory=None, resources={})
    check = check_answers((foreign,))
    assert check.ok is False
    assert "plain was not registered" in check.text
    assert "hetero-llm node list" in check.next


def test_another_version_on_one_node_fails_and_names_both_sides():
    answers = (answer("a"), answer("b"), answer("c", python_version="3.11.9"))
    check = check_same("cluster.python", "Python", answers, lambda item: item.python_version)
    assert check.ok is False
    assert check.text == "Python 3.11.7 on a, b; Python 3.11.9 on c"
    assert check.next == ("install Python 3.11.7 on every node",)


def test_a_silent_node_has_no_version_to_disagree_with():
    answers = (answer("a"), answer("b", ray_version=None))
    assert check_same("cluster.ray", "Ray", answers, lambda item: item.ray_version).ok is True


def test_versions_nobody_told_are_unknown():
    answers = (answer("a", ray_version=None),)
    assert check_same("cluster.ray", "Ray", answers, lambda item: item.ray_version).ok is None


@pytest.mark.parametrize(
    ("offset_s", "error_s", "ok"), [(0.5, 0.1, True), (-7.0, 0.1, False), (7.0, 0.1, False), (7.0, 3.0, True)]
)
def test_a_clock_is_wrong_only_beyond_what_the_measurement_leaves_open(offset_s, error_s, ok):
    check = check_clocks((answer("a"), answer("b", clock_offset_s=offset_s, clock_error_s=error_s)))
    assert check.ok is ok
    if not ok:
        assert f"b {offset_s:+.1f} s" in check.text


def test_clocks_nobody_measured_are_unknown():
    assert check_clocks((answer("a", clock_offset_s=None),)).ok is None


def test_loopback_addresses_are_right_on_one_host_only():
    one, two = inventory("a", "h1", "127.0.0.1"), inventory("b", "h1", "127.0.0.1")
    assert check_addresses((answer("a", one), answer("b", two))).ok is True
    far = inventory("b", "h2", "10.0.0.2")
    check = check_addresses((answer("a", one), answer("b", far)))
    assert check.ok is False
    assert check.text.startswith("a is at a loopback address")


def test_ray_must_count_as_many_devices_as_were_found():
    resources = {"hetero_toy": 2.0, "hetero_toy:T1": 2.0, "TPU": 1.0}
    check = check_counts(answer(resources=resources), {"toy": "TPU"})
    assert check.ok is False
    assert check.text == "TPU 2 found, 1 in Ray"


def test_a_failed_device_is_not_expected_in_ray():
    one = {"hetero_toy": 1.0, "hetero_toy:T1": 1.0}
    check = check_counts(answer(node=inventory("a", health=(Health.OK, Health.FAILED)), resources=one), {"toy": None})
    assert check.ok is True


def test_devices_ray_does_not_know_at_all_fail():
    assert check_counts(answer(resources={"CPU": 4.0}), {"toy": None}).ok is False


def test_nothing_is_counted_on_a_dead_node():
    assert check_counts(answer(node=inventory("a", alive=False), resources={}), {"toy": None}).ok is None
