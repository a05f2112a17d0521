import pytest

from hetero_llm.model import Device, Health, NodeInventory
from hetero_llm.scheduler.resources import (
    explicit_resources,
    label_value,
    node_labels,
    node_resources,
    raylet_environ,
    replica_resources,
)


def _device(index: int, kind: str = "ascend", accelerator: str = "910B2", health: Health = Health.OK) -> Device:
    return Device(kind=kind, accelerator=accelerator, uid=f"{kind}-{index}", index=index, health=health)


def _node(*devices: Device, kind: str = "ascend", **versions: str | None) -> NodeInventory:
    return NodeInventory(node="n", host="h", address="10.0.0.1", kind=kind, devices=devices, versions=versions)


def test_a_node_offers_the_native_resource_and_both_counters():
    assert node_resources(_node(_device(0), _device(1)), "NPU") == {
        "NPU": 2.0,
        "hetero_ascend": 2.0,
        "hetero_ascend:910B2": 2.0,
    }


def test_each_accelerator_type_of_a_node_is_counted_by_itself():
    resources = node_resources(_node(_device(0), _device(1, accelerator="310P3")), None)
    assert resources == {"hetero_ascend": 2.0, "hetero_ascend:910B2": 1.0, "hetero_ascend:310P3": 1.0}


def test_a_failed_device_is_not_offered():
    assert node_resources(_node(_device(0), _device(1, health=Health.FAILED)), None)["hetero_ascend"] == 1.0


def test_a_node_without_devices_says_zero_of_its_native_resource():
    assert node_resources(_node(), "NPU") == {"NPU": 0.0}


def test_a_raylet_for_several_kinds_adds_them_up_and_states_every_native_resource():
    nodes = [_node(_device(0, kind="cpu"), kind="cpu"), _node(_device(1))]
    resources = explicit_resources(nodes, {"cpu": None, "ascend": "NPU"})
    assert resources == {
        "GPU": 0.0,
        "NPU": 1.0,
        "hetero_cpu": 1.0,
        "hetero_cpu:910B2": 1.0,
        "hetero_ascend": 1.0,
        "hetero_ascend:910B2": 1.0,
    }


def test_a_replica_asks_for_everything_its_devices_are_counted_under():
    offered = node_resources(_node(_device(0), _device(1)), "NPU")
    assert replica_resources("ascend", "910B2", "NPU", 2) == offered


def test_labels_tell_kind_accelerator_host_and_versions():
    labels = node_labels(_node(_device(0), vllm="0.32.0+cpu", driver="25.5.1"))
    assert labels == {
        "hetero-llm.io/kind": "ascend",
        "hetero-llm.io/accelerator": "910B2",
        "hetero-llm.io/host": "h",
        "hetero-llm.io/vllm": "0.32.0-cpu",
        "hetero-llm.io/driver": "25.5.1",
    }


def test_versions_nobody_knows_give_no_label():
    assert "hetero-llm.io/driver" not in node_labels(_node(_device(0), driver=None))


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("2.13.0+cpu", "2.13.0-cpu"),
        ("-edge_", "edge"),
        ("a b/c", "a-b-c"),
        ("x" * 70, "x" * 63),
        ("x" * 62 + ".tail", "x" * 62),
        ("++", ""),
    ],
)
def test_label_values_have_only_what_ray_takes(text: str, label: str):
    assert label_value(text) == label


class _Native:
    """As much of a backend as the question needs: how ids are written is the backend's business."""

    native_resource = "NPU"

    def device_env(self, devices):
        return {"SEEN": ",".join(str(device.index) for device in devices)}


def test_a_raylet_hands_out_the_ids_of_usable_devices_only():
    devices = [_device(0), _device(1, health=Health.FAILED), _device(2, health=Health.DEGRADED), _device(3)]
    assert raylet_environ(_node(*devices), _Native()) == {"SEEN": "0,2,3"}


def test_a_kind_whose_devices_are_leased_tells_the_raylet_nothing():
    backend = _Native()
    backend.native_resource = None
    assert raylet_environ(_node(_device(0)), backend) == {}
