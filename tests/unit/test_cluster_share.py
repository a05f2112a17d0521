"""Which devices a replica holds on its node. Ray's answer and the published node are stand-ins; the leases are real."""

from types import SimpleNamespace

import pytest

from hetero_llm.cluster import share
from hetero_llm.cluster.lease import DeviceLease
from hetero_llm.errors import DeviceBusy
from hetero_llm.model import Device, Health, NodeInventory

NATIVE = SimpleNamespace(native_resource="GPU")
LEASED = SimpleNamespace(native_resource=None)


@pytest.fixture
def take(monkeypatch, tmp_path):
    """Return a function that takes devices as an actor would to which Ray assigned `ids`."""
    monkeypatch.setenv("HETERO_LLM_LEASE_DIR", str(tmp_path))
    monkeypatch.setattr(share, "DEVICE_WAIT_S", 0.2)
    monkeypatch.setattr(share, "WANTED_WAIT_S", 0.1)
    held = []

    def take(devices, ids=(), *, backend=NATIVE, planned=(), accelerator="a"):
        node = NodeInventory(node="n", host="n", address="10.0.0.1", kind="k", devices=tuple(devices))
        monkeypatch.setattr(share, "node_here", lambda: node)
        context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": list(map(str, ids))})
        monkeypatch.setattr(share.ray, "get_runtime_context", lambda: context)
        count = len(ids) or len(planned)
        spec = SimpleNamespace(kind="k", accelerator=accelerator, planned=planned, devices_per_node=count)
        own = share.EngineShare(spec, f"r{len(held)}")
        held.append(own)
        return [device.index for device in own.take_devices(SimpleNamespace(backend=lambda kind: backend)).devices]

    yield take
    for own in held:
        own.stop()


def device(index, health=Health.OK, accelerator="a"):
    return Device(kind="k", accelerator=accelerator, uid=f"u{index}", index=index, health=health)


def test_what_ray_assigned_is_taken_in_ascending_order(take):
    assert take(map(device, range(8)), [6, 4]) == [4, 6]
    assert take(map(device, range(8)), [7, 0]) == [0, 7]


def test_who_is_assigned_a_device_that_has_failed_takes_another_and_so_does_whom_that_was_meant_for(take):
    devices = [device(0), device(1, Health.FAILED), device(2), device(3)]
    assert take(devices, [1]) == [0]
    assert take(devices, [0]) == [2]
    assert take(devices, [3]) == [3]
    with pytest.raises(DeviceBusy, match="only 0 are free"):
        take(devices, [2])


def test_a_node_with_devices_of_two_types_gives_a_replica_its_own_type(take):
    devices = [device(0, accelerator="b"), device(1), device(2, accelerator="b"), device(3)]
    assert take(devices, [0, 1]) == [1, 3]
    assert take(devices, [3, 2], accelerator="b") == [0, 2]


def test_a_device_that_works_again_is_taken_by_whom_its_stand_in_was_meant_for(take):
    assert take([device(0, Health.FAILED), device(1)], [0]) == [1]
    assert take([device(0), device(1)], [1]) == [0]


def test_holders_are_named_when_too_few_devices_are_free(take):
    other = DeviceLease.acquire(["u0"], 1, "of-another-cluster", deadline_s=0.0)
    with pytest.raises(DeviceBusy) as refused:
        take([device(0)], [0])
    assert refused.value.report.cause == "u0 is held by of-another-cluster"
    other.release()


def test_an_id_the_node_does_not_have_is_an_error(take):
    with pytest.raises(DeviceBusy, match="Ray assigned GPU 5"):
        take([device(0), device(1)], [5])


def test_without_ids_of_ray_the_planned_devices_are_taken_in_their_order_and_others_when_those_stay_taken(take):
    devices = list(map(device, range(4)))
    assert take(devices, backend=LEASED, planned=("u3", "u1")) == [3, 1]
    assert take(devices, backend=LEASED, planned=("u3",)) == [0]
