"""Ray nodes as child processes: registered with what they have, watched, and gone when their starter is."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import node_starts
import psutil
import pytest
from local_cluster import PATIENCE_S, local_place, ray, wait_for
from node_starts import LOOPBACK, start
from stub_backend import SUPPORT

from hetero_llm.cluster.address import make_token, use_token
from hetero_llm.cluster.node_agent import NodeAgent, check_joinable, compare_versions
from hetero_llm.cluster.nodes import published_nodes
from hetero_llm.cluster.plain_nodes import plain_nodes
from hetero_llm.cluster.session import attach, connect, detach
from hetero_llm.errors import ClusterStartFailed, ClusterUnreachable, NodeNameTaken, VersionMismatch

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def box():
    with local_place() as place:
        yield place
        left = [thing for thing in place.leftovers() if not thing.startswith("shared memory")]
        assert not left, left


@pytest.fixture(scope="module")
def head(box):
    """A cluster whose head has no devices."""
    agent = node_starts.head()
    with contextlib.ExitStack() as stack:
        stack.callback(agent.leave)
        agent.register()
        yield agent


@pytest.fixture
def member(head):
    """What joins the cluster and is taken out at the end of a test."""
    agents = []

    def join(*nodes, **options):
        agents.append(NodeAgent())
        agents[-1].join(head.address, nodes)
        agents[-1].register(**options)
        return agents[-1]

    yield join
    for agent in agents:
        agent.withdraw()
        agent.leave()


@contextlib.contextmanager
def driver(agent):
    attach(agent.address)
    try:
        yield
    finally:
        detach()


def alive_nodes():
    return {node.node: node for node in published_nodes().nodes if node.alive}


def test_each_node_has_the_resources_and_labels_of_its_kind_only(head, member):
    member(start("gpu", "cuda", 2), start("npu", "ascend", 1, zone="a"))
    with driver(head):
        of = {n["Labels"].get("hetero-llm.io/kind"): n for n in ray.nodes() if n["Alive"]}
        ours = {
            kind: {name: n for name, n in found["Resources"].items() if name in ("GPU", "NPU") or "hetero" in name}
            for kind, found in of.items()
        }
        labels = of["ascend"]["Labels"]
    assert ours == {
        None: {},
        "cuda": {"GPU": 2.0, "hetero_cuda": 2.0, "hetero_cuda:s1": 2.0},
        "ascend": {"NPU": 1.0, "hetero_ascend": 1.0, "hetero_ascend:s1": 1.0},
    }
    assert (labels["hetero-llm.io/host"], labels["zone"]) == ("box", "a")


def test_a_joined_node_is_in_the_inventory_with_its_address_and_is_forgotten_when_it_leaves(head, member):
    agent = member(start("gpu", "cuda", 2, rack="7"))
    with driver(head):
        joined = alive_nodes()["gpu"]
    assert (joined.kind, joined.host, joined.address, joined.labels) == ("cuda", "box", LOOPBACK, {"rack": "7"})
    assert [device.uid for device in joined.devices] == ["gpu-0", "gpu-1"]
    agent.withdraw()
    agent.leave()
    with driver(head):
        assert [node.node for node in published_nodes().nodes] == []


def test_two_nodes_of_one_kind_are_told_apart(head, member):
    member(start("npu-a", "ascend", 1), start("npu-b", "ascend", 1))
    with driver(head):
        nodes = alive_nodes()
        assert ray.cluster_resources()["NPU"] == 2.0
    assert nodes["npu-a"].ray_node_id != nodes["npu-b"].ray_node_id


def test_a_killed_node_is_down_in_the_inventory_and_the_others_stay_up(head, member):
    agent = member(start("npu-a", "ascend", 1), start("npu-b", "ascend", 1))
    os.kill(agent.pids()["npu-a"], signal.SIGKILL)
    wait_for(lambda: agent.lost() == ("npu-a",))
    with driver(head):
        wait_for(lambda: "npu-a" not in alive_nodes())
        assert [node.node for node in published_nodes().nodes] == ["npu-a", "npu-b"]
        assert list(alive_nodes()) == ["npu-b"]


def test_a_node_ends_when_its_raylet_does(head, member):
    agent = member(start("gpu", "cuda", 1))
    (raylet,) = [p for p in psutil.Process(agent.pids()["gpu"]).children() if p.name() == "raylet"]
    raylet.kill()
    wait_for(lambda: agent.lost() == ("gpu",))


def test_a_second_node_of_a_name_is_refused_and_the_first_stays(head, member):
    member(start("gpu", "cuda", 1))
    with pytest.raises(NodeNameTaken, match="'gpu'"):
        member(start("gpu", "cuda", 2), name_deadline_s=0.5)
    with driver(head):
        assert len(alive_nodes()["gpu"].devices) == 1


def test_a_name_comes_back_right_after_its_node_died(head, member):
    agent = member(start("gpu", "cuda", 1))
    os.kill(agent.pids()["gpu"], signal.SIGKILL)
    member(start("gpu", "cuda", 3), name_deadline_s=PATIENCE_S)
    with driver(head):
        assert len(alive_nodes()["gpu"].devices) == 3


def test_a_head_without_devices_is_no_node_to_plan_on_and_no_plain_ray_node(head):
    with driver(head):
        assert published_nodes().nodes == ()
        assert plain_nodes(()) == ()


def test_a_visitor_connects_by_address_and_token(head, box):
    session = connect(head.address)
    assert (session.address, session.started_here) == (head.address, False)
    session.close()


def test_nothing_listens_beyond_loopback(head, member, box):
    member(start("gpu", "cuda", 1))
    found = set()
    for process in box.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {ip.removeprefix("::ffff:") for ip in found} == {LOOPBACK}


# -- what is told before a node starts --------------------------------------------------------------------------------


def test_a_cluster_of_the_same_versions_may_be_joined(head):
    check_joinable(head.address)


def test_a_wrong_token_is_told_before_a_node_starts(head, box):
    right = os.environ["RAY_AUTH_TOKEN_PATH"]
    wrong = box.root / "wrong-token"
    make_token(wrong)
    use_token(wrong)
    try:
        with pytest.raises(ClusterUnreachable) as caught:
            check_joinable(head.address)
    finally:
        use_token(right)
    assert caught.value.report.cause == "the cluster refuses the token"
    assert any("--token-file" in step for step in caught.value.report.next)


def test_another_ray_is_told_with_the_command_that_installs_it():
    here = ".".join(map(str, sys.version_info[:3]))
    with pytest.raises(VersionMismatch, match=r"runs Ray 2\.59\.1 ") as caught:
        compare_versions("head:6379", ("2.59.1", here))
    assert caught.value.report.next == ("pip install 'ray[default,serve]==2.59.1'",)


def test_another_patch_release_of_python_is_told_unless_it_is_let_in(monkeypatch):
    other = f"{sys.version_info.major}.{sys.version_info.minor}.99"
    with pytest.raises(VersionMismatch) as caught:
        compare_versions("head:6379", (ray.__version__, other))
    assert any("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor" in step for step in caught.value.report.next)
    monkeypatch.setenv("RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL", "minor")
    compare_versions("head:6379", (ray.__version__, other))


def test_a_port_in_use_is_told_at_once(box):
    agent = NodeAgent()
    with socket.create_server((LOOPBACK, 0)) as other, pytest.raises(ClusterStartFailed, match="cannot listen"):
        agent.start_head(start("head", None, 0), other.getsockname()[1])
    agent.leave()
    assert not Path(agent.root).exists()


def test_a_node_that_cannot_start_says_why_and_leaves_nothing(head):
    agent = NodeAgent()
    bad = start("bad", "cuda", 1)
    agent.join(head.address, [replace(bad, environ={**bad.environ, "RAY_OVERRIDE_RESOURCES": "nonsense"})])
    with pytest.raises(ClusterStartFailed, match="node bad did not start") as caught:
        agent.register()
    assert caught.value.report.cause
    agent.leave()
    assert not Path(agent.root).exists()


# -- the starter goes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, None], ids=["killed", "ended"])
def test_nothing_is_left_of_a_cluster_whose_starter_is_gone(box, how):
    before = {process.pid for process in box.processes()}
    argv = [sys.executable, "-W", "ignore", str(SUPPORT / "node_starts.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        root = starter.stdout.readline().decode().strip()
        assert Path(root).is_dir()
        assert len(box.processes()) > len(before) + 4
        if how is not None:
            starter.send_signal(how)
        starter.stdin.close()
        starter.wait(60.0)
    wait_for(lambda: {process.pid for process in box.processes()} <= before)
    assert not Path(root).exists()
