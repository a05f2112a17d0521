"""A node tells the cluster when health or free memory of its devices changes; a tool that hung costs it none."""

import threading
from dataclasses import replace

import pytest

from hetero_llm.cluster.health import HealthWatch
from hetero_llm.cluster.lease import DeviceLease, holders
from hetero_llm.errors import ClusterUnreachable
from hetero_llm.model import Device, Health, NodeInventory, Problem
from hetero_llm.plugin import Discovery

OK, BAD = Health.OK, Health.FAILED
HUNG = Problem(kind="cuda", code="HL202", text="discovery of 'cuda' did not answer within 10 s")


GIB = 1 << 30
MEMORY_BYTES = 80 * GIB
DEADLINE_S = 60.0


def devices(*health, free=MEMORY_BYTES):
    return tuple(
        Device(
            kind="cuda", accelerator="X", uid=f"u{n}", index=n, health=one, memory_bytes=MEMORY_BYTES, free_bytes=free
        )
        for n, one in enumerate(health)
    )


NODE = NodeInventory(node="a", host="a", address="10.0.0.1", kind="cuda", devices=devices(OK, OK), ray_node_id="r")


class Watch:
    def __init__(self, *readings, node=NODE, held=lambda uids: ()):
        self.published, self.told = [], []
        self.reachable = True
        self._readings = iter(readings)
        self.watch = HealthWatch([node], self.read, self.publish, self.told.append, period_s=0.001, held=held)

    def read(self, kinds, stopped):
        return {"cuda": next(self._readings)}

    def publish(self, node):
        if not self.reachable:
            raise ClusterUnreachable("no answer")
        self.published.append(node)

    def look(self, times=1):
        for _ in range(times):
            self.watch.look()
        return [[device.health for device in node.devices] for node in self.published]

    def free_gib(self, times=1):
        self.look(times)
        return [[device.free_bytes / GIB for device in node.devices] for node in self.published]


def found(*health, problems=()):
    return Discovery(devices=devices(*health), problems=problems)


def free(*free_gib):
    read = zip(devices(*(OK for _ in free_gib)), free_gib, strict=True)
    return Discovery(
        devices=tuple(replace(device, free_bytes=None if gib is None else int(gib * GIB)) for device, gib in read)
    )


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
    other = tuple(replace(d, accelerator="Y", index=7, memory_bytes=1) for d in devices(OK, BAD))
    watch = Watch(Discovery(devices=other))
    watch.look()
    assert watch.published == [replace(NODE, devices=devices(OK, BAD))]


def test_memory_that_others_took_is_published():
    assert Watch(free(80, 20)).free_gib() == [[80, 20]]


def test_memory_that_others_gave_back_is_published():
    assert Watch(free(80, 20), free(80, 80)).free_gib(2) == [[80, 20], [80, 80]]


def test_memory_that_moves_a_little_is_not_published():
    assert Watch(free(80, 76.1), free(76.1, 80)).free_gib(2) == []


def test_small_moves_add_up_to_one_that_is_published():
    assert Watch(free(80, 77), free(80, 75)).free_gib(2) == [[80, 75]]


def test_on_a_small_device_five_percent_are_not_enough():
    small = replace(NODE, devices=tuple(replace(d, memory_bytes=GIB, free_bytes=GIB) for d in NODE.devices))
    assert Watch(free(1, 0.875), free(1, 0.625), node=small).free_gib(2) == [[1, 0.625]]


def test_a_changed_health_is_published_with_the_memory_of_the_same_reading():
    assert Watch(Discovery(devices=devices(OK, BAD, free=79 * GIB))).free_gib() == [[79, 79]]


def test_memory_that_could_not_be_read_stays_what_it_was():
    assert Watch(free(80, 20), free(None, None)).free_gib(2) == [[80, 20]]


def test_memory_is_published_once_it_can_be_read():
    unread = replace(NODE, devices=tuple(replace(d, free_bytes=None) for d in NODE.devices))
    assert Watch(free(80, 79), node=unread).free_gib() == [[80, 79]]


def test_what_a_replica_uses_is_not_taken_for_what_others_took(tmp_path):
    watch = Watch(*[free(2, 80)] * 2, held=lambda uids: holders(uids, tmp_path))
    lease = DeviceLease.acquire(["u0"], 1, "r-1", deadline_s=0, where=tmp_path)
    assert watch.free_gib() == [], "the memory of the replica is free again as soon as it is gone"
    lease.release()
    assert watch.free_gib() == [[2, 80]], "whoever uses it now is not one of ours"


def test_a_replica_that_ends_during_the_reading_counts_as_holding(tmp_path):
    lease = DeviceLease.acquire(["u0"], 1, "r-1", deadline_s=0, where=tmp_path)

    def reading():
        lease.release()
        yield free(2, 80)

    watch = Watch(held=lambda uids: holders(uids, tmp_path))
    watch._readings = reading()
    assert watch.free_gib() == []


def test_a_replica_on_the_systems_memory_is_in_the_reading_of_every_device():
    shared = replace(NODE, devices=tuple(replace(d, unified_memory=True) for d in NODE.devices))
    assert Watch(free(60, 60), node=shared, held=lambda uids: ["u0"]).free_gib() == []
    assert Watch(free(60, 60), node=shared).free_gib() == [[60, 60]]


def test_what_could_not_be_published_is_tried_again():
    watch = Watch(found(OK, BAD), found(OK, BAD))
    watch.reachable = False
    with pytest.raises(ClusterUnreachable):
        watch.look()
    watch.reachable = True
    assert watch.look() == [[OK, BAD]]


def test_a_change_is_told_once_it_is_published():
    watch = Watch(found(OK, BAD), found(OK, BAD))
    watch.reachable = False
    with pytest.raises(ClusterUnreachable):
        watch.look()
    assert watch.told == []
    watch.reachable = True
    watch.look()
    assert watch.told == ["node a: cuda X 1 (u1) was ok, is failed"]


def test_it_goes_on_after_any_error():
    def read(kinds, stopped):
        calls.append(kinds)
        if len(calls) == 1:
            raise OSError("too many open files")
        return {"cuda": found(OK, BAD)}

    calls, told, published = [], [], threading.Event()
    watch = HealthWatch([NODE], read, lambda node: published.set(), told.append, 0.001, lambda uids: ())
    watch.start()
    assert published.wait(DEADLINE_S)
    watch.stop()
    assert told[0] == "device health was not published: OSError: too many open files"


def test_nothing_is_published_after_the_end_by_a_reading_that_was_under_way():
    watch = Watch()

    def reading():
        watch.watch.stop()
        yield found(OK, BAD)

    watch._readings = reading()
    assert watch.look() == []


def test_the_end_waits_for_a_publication_under_way():
    began, go, order = threading.Event(), threading.Event(), []

    def publish(node):
        began.set()
        assert go.wait(DEADLINE_S)
        order.append("published")

    def stop():
        watch.stop()
        order.append("stopped")

    watch = HealthWatch([NODE], lambda *_: {"cuda": found(OK, BAD)}, publish, [].append, 0.001, lambda uids: ())
    watch.start()
    assert began.wait(DEADLINE_S)
    ending = threading.Thread(target=stop)
    ending.start()
    ending.join(0.2)
    go.set()
    ending.join(DEADLINE_S)
    assert order == ["published", "stopped"]


def test_the_end_stops_a_reading_under_way_and_waits_for_it():
    began, ended = threading.Event(), []

    def read(kinds, stopped):
        began.set()
        ended.append(stopped.wait(DEADLINE_S))
        return {"cuda": Discovery()}

    watch = HealthWatch([NODE], read, lambda node: None, [].append, 0.001, lambda uids: ())
    watch.start()
    assert began.wait(DEADLINE_S)
    watch.stop()
    assert ended == [True]
