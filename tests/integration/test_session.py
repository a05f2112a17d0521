"""Starting, joining and ending a cluster; each process that joins or owns another one is a real one."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_cluster import is_gone, local_cluster, local_place, ray
from stub_backend import SUPPORT

from hetero_llm.cluster import state
from hetero_llm.cluster.health import watch_nodes
from hetero_llm.cluster.nodes import published_nodes, republish_node
from hetero_llm.model import Health

pytestmark = pytest.mark.ray

JOIN = """
import json, sys, time
from hetero_llm.errors import HeteroError
from hetero_llm.cluster.session import connect
began = time.monotonic()
try:
    session = connect(sys.argv[1] if len(sys.argv) > 1 else None)
    said = {"address": session.address, "devices": [d.held_by for n in session.inventory().nodes for d in n.devices]}
    session.close()
    session.close()
except HeteroError as error:
    said = {"code": error.code, "message": str(error), "cause": error.report.cause, "next": error.report.next}
print(json.dumps({**said, "seconds": time.monotonic() - began}))
"""

STARTS = """
import json
from stub_backend import node
from hetero_llm.errors import HeteroError
from hetero_llm.cluster.session import start_local
try:
    start_local([node(1)], {"stub": None}).close()
except HeteroError as error:
    print(json.dumps({"code": error.code, "cause": error.report.cause}))
"""


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as running:
        yield running


@pytest.fixture
def record(cluster):
    """The cluster as `serve` makes it known on this machine."""
    made = state.new_record("here", started_unix_s=time.time())
    state.write_record(made)
    yield state.update_record(made, address=cluster.session.address, temp_dir=cluster.session.temp_dir, models=("m",))
    state.remove_record("here")


def run(program, *arguments, **env):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120.0,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def token_of(cluster):
    return {"RAY_AUTH_TOKEN_PATH": str(Path(cluster.session.temp_dir) / "token")}


# -- nobody there -----------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_state(tmp_path):
    return {"HETERO_LLM_STATE_DIR": str(tmp_path / "state")}


def test_without_an_address_and_a_record_nothing_is_running(empty_state):
    said = run(JOIN, **empty_state)
    assert said["code"] == "HL403"
    assert said["next"] == ["hetero-llm serve"]
    assert said["seconds"] < 10.0


def test_an_address_where_nobody_listens_is_unreachable_soon(empty_state):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        said = run(JOIN, f"127.0.0.1:{probe.getsockname()[1]}", **empty_state)
    assert said["code"] == "HL401"
    assert "refused" in said["cause"]
    assert said["seconds"] < 10.0


def test_an_address_where_something_else_listens_is_unreachable_soon(empty_state, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    token = {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    with socket.create_server(("127.0.0.1", 0)) as other:
        said = run(JOIN, f"127.0.0.1:{other.getsockname()[1]}", **empty_state, **token)
    assert said["code"] == "HL401"
    assert "does not answer like Ray" in said["cause"]
    assert said["seconds"] < 10.0


def test_ray_address_is_used_when_no_address_is_given(empty_state):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        said = run(JOIN, RAY_ADDRESS=address, **empty_state)
    assert (said["code"], said["message"]) == ("HL401", f"no cluster answers at {address}")


def test_a_temporary_folder_ray_cannot_use_is_a_typed_error_and_leaves_nothing(tmp_path):
    too_long = tmp_path / ("long" * 25)
    too_long.mkdir()
    said = run(STARTS, TMPDIR=str(too_long), PYTHONPATH=str(SUPPORT), HETERO_LLM_LEASE_DIR=str(tmp_path / "lease"))
    assert said["code"] == "HL402"
    assert "path" in said["cause"]
    assert list(too_long.iterdir()) == []


# -- a cluster is there -----------------------------------------------------------------------------------------------


def test_the_one_serve_of_the_machine_is_found_and_stays_when_a_visitor_leaves(cluster, record):
    said = run(JOIN)
    assert said["address"] == cluster.session.address
    assert said["devices"] == [None] * 4
    assert len(cluster.session.inventory().nodes) == 1


def test_several_serves_of_the_machine_are_named_instead_of_guessed(cluster, record):
    other = state.new_record("other", started_unix_s=time.time())
    state.write_record(other)
    state.update_record(other, address="127.0.0.1:1", models=("n",))
    said = run(JOIN)
    state.remove_record("other")
    assert said["code"] == "HL403"
    assert said["next"] == [f"--address {cluster.session.address}   # m", "--address 127.0.0.1:1   # n"]


def test_a_wrong_token_is_refused_soon(cluster, empty_state, tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    said = run(JOIN, cluster.session.address, RAY_AUTH_TOKEN_PATH=str(token), **empty_state)
    assert (said["code"], said["cause"]) == ("HL401", "the cluster refuses the token")
    assert said["seconds"] < 10.0


def test_the_devices_are_ray_resources(cluster):
    assert {name: n for name, n in ray.cluster_resources().items() if "hetero" in name} == {
        "hetero_stub": 4.0,
        "hetero_stub:s1": 4.0,
    }


def test_the_token_is_readable_by_its_owner_only(cluster):
    token = Path(cluster.session.temp_dir) / "token"
    assert token.stat().st_mode & 0o077 == 0
    assert len(token.read_text()) == 64


def test_a_device_that_is_gone_is_told_to_the_cluster_and_to_people(cluster):
    def health():
        return {device.health for node in cluster.session.inventory().nodes for device in node.devices}

    (node,) = published_nodes().nodes
    told = []
    watch = watch_nodes((node,), cluster.session.address, told.append)
    try:
        assert health() == {Health.OK}
        watch.look()  # the stub's discovery finds nothing
        assert health() == {Health.FAILED}
        assert told[0] == "node here: stub s1 0 (stub-0) was ok, is failed"
    finally:
        watch.stop()
        republish_node(cluster.session.address, node)


def test_a_second_cluster_with_a_starting_engine_ends_soon_and_does_not_disturb_the_first(cluster):
    with local_place() as box:
        argv = [sys.executable, str(SUPPORT / "local_cluster.py")]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            address, temp_dir = other.stdout.readline().decode().split()
            theirs = box.processes()
            assert address != cluster.session.address
            assert [process for process in theirs if "engine_program" in " ".join(process.cmdline())]
            assert [len(node.devices) for node in cluster.session.inventory().nodes] == [4]
            began = time.monotonic()
            other.stdin.close()
            assert other.wait(60.0) == 0
            assert time.monotonic() - began < 15.0
        assert box.leftovers() == []
        assert all(is_gone(process.pid) for process in theirs)
        assert not Path(temp_dir).exists()
    assert [len(node.devices) for node in cluster.session.inventory().nodes] == [4]
    assert cluster.table().replicas == ()
