"""A node tells the cluster when the health of its devices changes, and never loses them to a tool that hung."""

from dataclasses import replace

import pytest

from hetero_llm.cluster.health import HealthWatch
from hetero_llm.errors import ClusterUnreachable
from hetero_llm.model import Device, Health, NodeInventory, Problem
from hetero_llm.plugin import Discovery

OK, BAD = Health.OK, Health.FAILED
HUNG = Problem(kind="cuda", code="HL202", text="discovery of 'cuda' did not answer within 10 s")


def devices(*health):
    return tuple(
        Device(kind="cuda", accelerator="X", uid=f"u{n}", index=n, health=one, free_bytes=7)
        for n, one in enumerate(health)
    )


NODE = NodeInventory(node="a", host="a", address="10.0.0.1", kind="cuda", devices=devices(OK, OK), ray_node_id="r")


class Watch:
    def __init__(self, *readings):
        self.published, self.told = [], []
        self.reachable = True
        self._readings = iter(readings)
        self.watch = HealthWatch([NODE], lambda kinds: {"cuda": next(self._readings)}, self.publish, self.told.append)

    def publish(self, node):
        if not self.reachable:
            raise ClusterUnreachable("no answer")
        self.published.append(node)

    def look(self, times=1):
        for _ in range(times):
            self.watch.look()
        return [[device.health for device in node.devices] for node in self.published]


def found(*health, problems=()):
    return Discovery(devices=devices(*health), problems=problems)


def test_nothing_is_published_while_nothing_changes():
    assert Watch(found(OK, OK), found(OK, OK)).look(2) == []


def test_a_device_that_fails_is_published_and_told():
    watch = Watch(found(OK, BAD))
    assert watch.look() == [[OK, BAD]]
    assert watch.told == ["node a: cuda X 1 (u1) was ok, is failed"]


def test_a_device_that_is_not_listed_any_more_has_failed():
    assert Watch(Discovery(devices=devices(OK))).look() == [[OK, BAD]]


def test_a_flapping_device_is_kept_out_until_it_was_good_three_times():
    flapping = [found(OK, BAD), found(OK, OK)] * 2 + [found(OK, BAD), *[found(OK, OK)] * 3]
    assert Watch(*flapping).look(8) == [[OK, BAD], [OK, OK], [OK, BAD], [OK, OK], [OK, BAD], [OK, OK]]
    assert Watch(*flapping[:7]).look(7)[-1] == [OK, BAD], "two good readings are not enough"


def test_a_tool_that_hung_is_a_problem_and_costs_no_device():
    watch = Watch(Discovery(problems=(HUNG,)), found(OK, OK))
    assert watch.look(2) == [[OK, OK], [OK, OK]]
    assert [node.problems for node in watch.published] == [(HUNG,), ()]
    assert watch.told == [f"node a: {HUNG.text}"]


def test_what_ray_was_told_at_the_start_stays():
    watch = Watch(replace(found(OK, BAD), devices=tuple(replace(d, free_bytes=1) for d in devices(OK, BAD))))
    watch.look()
    assert [device.free_bytes for device in watch.published[0].devices] == [7, 7]
    assert watch.published[0].ray_node_id == "r"


def test_what_could_not_be_published_is_tried_again():
    watch = Watch(found(OK, BAD), found(OK, BAD))
    watch.reachable = False
    with pytest.raises(ClusterUnreachable):
        watch.look()
    watch.reachable = True
    assert watch.look() == [[OK, BAD]]
