"""A local cluster on a machine of several kinds: one Ray node each."""

import contextlib
from dataclasses import replace

import psutil
import pytest
from local_cluster import local_place, ray
from stub_backend import node

from hetero_llm.cluster.session import start_local

pytestmark = pytest.mark.ray


def kind_node(kind, devices):
    base = node(devices)
    own = (replace(device, kind=kind, uid=f"{kind}-{device.index}") for device in base.devices)
    return replace(base, node=f"here-{kind}", kind=kind, devices=tuple(own))


@pytest.fixture(scope="module")
def three_kinds():
    nodes = [node(2), kind_node("cuda", 2), kind_node("ascend", 3)]
    with local_place() as box:
        with contextlib.closing(start_local(nodes, {"cuda": "GPU", "ascend": "NPU", "stub": None})) as session:
            yield session, box
        assert [thing for thing in box.leftovers() if not thing.startswith("shared memory")] == []


def test_each_kind_is_a_ray_node_of_its_own_with_nothing_of_the_others(three_kinds):
    ours = {}
    for found in ray.nodes():
        names = {name: n for name, n in found["Resources"].items() if name in ("GPU", "NPU") or "hetero_" in name}
        ours[found["Labels"]["hetero-llm.io/kind"]] = names
    assert ours == {
        "stub": {"hetero_stub": 2.0, "hetero_stub:s1": 2.0},
        "cuda": {"GPU": 2.0, "hetero_cuda": 2.0, "hetero_cuda:s1": 2.0},
        "ascend": {"NPU": 3.0, "hetero_ascend": 3.0, "hetero_ascend:s1": 3.0},
    }


def test_each_kind_is_in_the_inventory_under_its_own_ray_node_and_one_host(three_kinds):
    nodes = three_kinds[0].inventory().nodes
    assert {one.node: len(one.devices) for one in nodes} == {"here": 2, "here-cuda": 2, "here-ascend": 3}
    assert len({one.ray_node_id for one in nodes}) == 3
    assert {(one.host, one.address, one.alive) for one in nodes} == {("here", "127.0.0.1", True)}


def test_the_nodes_of_all_kinds_listen_on_loopback_only(three_kinds):
    found = set()
    for process in three_kinds[1].processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {ip.removeprefix("::ffff:") for ip in found} == {"127.0.0.1"}
