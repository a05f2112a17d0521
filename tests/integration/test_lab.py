"""`lab up` and `lab down` as commands: a cluster of four Ray nodes on this machine, and nothing of it afterwards."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from local_cluster import wait_for
from sandbox import Sandbox

from hetero_llm.cluster.lease import LeaseNote

pytestmark = pytest.mark.ray

PATIENCE_S = 60.0

FOUR = """\
nodes:
  - {name: gpu-a, kind: cuda, devices: "count=1,type=H100-80GB,memory=80GiB"}
  - {name: npu-a, kind: ascend, devices: "count=2,type=910B2,memory=64GiB", host: box, labels: {rack: 7}}
  - {name: npu-b, kind: ascend, devices: "count=2,type=910B2,memory=64GiB", host: box}
  - {name: cpu-a, kind: cpu}
"""

ONE = 'nodes: [{name: only, kind: toynpu, devices: "count=1,type=T1,memory=1GiB"}]'


@pytest.fixture(scope="module")
def place():
    box = Sandbox(Path("unused"), engines=False)
    yield box
    box.run("lab", "down")
    try:
        assert box.leftovers() == []
    finally:
        box.close()


@pytest.fixture(scope="module")
def four(place):
    """The running lab of four nodes: what `lab up` answered."""
    return up(place, FOUR)


@pytest.fixture
def own_place():
    box = Sandbox(Path("unused"), engines=False)
    yield box
    box.close()


def up(box, text):
    file = box.root / "lab.yaml"
    file.write_text(text)
    done = box.run("lab", "up", str(file), "-o", "json", timeout_s=200.0)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout)["data"], "err": done.stderr}


def nodes(box):
    return {node["node"]: node for node in box.json("node", "list")["nodes"]}


def test_it_says_what_joined_where_it_is_and_how_to_end_it(four):
    assert four["nodes"] == ["gpu-a", "npu-a", "npu-b", "cpu-a"]
    assert four["address"].startswith("127.0.0.1:")
    assert four["serve"] == "hetero-llm serve --kind cuda --kind ascend --kind cpu --replicas auto"
    assert "node npu-a joined: 2 x ascend 910B2 (simulated)" in four["err"]
    assert four["down"] == "hetero-llm lab down"


def test_the_inventory_has_every_node_with_its_own_devices(place, four):
    found = nodes(place)
    kinds = Counter(node["kind"] for node in found.values())
    assert kinds == {"cuda": 1, "ascend": 2, "cpu": 1}
    assert all(node["alive"] for node in found.values())
    uids = [device["uid"] for node in found.values() for device in node["devices"]]
    assert len(set(uids)) == len(uids) >= 6
    assert [device["uid"] for device in found["npu-b"]["devices"]] == [f"simulated-npu-b-ascend-{n}" for n in (0, 1)]
    assert (found["npu-a"]["host"], found["npu-a"]["labels"], found["gpu-a"]["host"]) == ("box", {"rack": "7"}, "gpu-a")


def test_pretended_devices_are_simulated_and_real_ones_are_not(place, four):
    simulated = {name: {d["simulated"] for d in node["devices"]} for name, node in nodes(place).items()}
    assert simulated == {"gpu-a": {True}, "npu-a": {True}, "npu-b": {True}, "cpu-a": {False}}


def test_devices_and_plan_use_it_without_being_told(place, four):
    assert {node["node"] for node in place.json("devices")["nodes"]} == set(four["nodes"])
    tables = place.run("devices").stdout
    assert "910B2 (simulated)" in tables


def test_a_second_lab_is_refused_and_the_first_stays(place, four):
    done = place.run("lab", "up", str(place.root / "lab.yaml"), "-o", "json")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (1, "HL410")
    assert len(nodes(place)) == 4


def test_its_token_and_log_are_known_and_the_token_is_private(four):
    assert Path(four["token"]).stat().st_mode & 0o077 == 0
    assert Path(four["log"]).is_file()


def test_a_killed_node_is_shown_as_down_and_the_log_names_it(place, four):
    (pid,) = [process.pid for process in place.processes() if is_node(process, "npu-b")]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not nodes(place)["npu-b"]["alive"], PATIENCE_S)
    assert all(node["alive"] for name, node in nodes(place).items() if name != "npu-b")
    wait_for(lambda: "node npu-b ended by itself" in Path(four["log"]).read_text(), PATIENCE_S)


ASKS = """
import sys, time
from hetero_llm.cluster.session import connect
from hetero_llm.errors import HeteroError
session = connect()
print("connected", flush=True)
try:
    while True:
        session.inventory()
        time.sleep(0.1)
except HeteroError as error:
    print(error.code, error, flush=True)
session.close()
"""


def test_who_uses_a_lab_that_is_gone_is_told_before_ray_ends_the_process(own_place):
    up(own_place, ONE)
    argv = [sys.executable, "-c", ASKS]
    with subprocess.Popen(argv, env=own_place.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as user:
        assert user.stdout.readline() == b"connected\n"
        (gcs,) = [process for process in own_place.processes() if process.name() == "gcs_server"]
        gcs.kill()
        assert user.stdout.readline().startswith(b"HL401 the cluster at ")
    wait_for(lambda: own_place.processes() == [], PATIENCE_S)
    own_place.run("node", "list")  # any command tidies up what the lab could not
    assert own_place.leftovers() == []


def is_node(process, name):
    return "hetero_llm.cluster.raylet" in process.cmdline() and process.environ().get("HETERO_LLM_NODE_NAME") == name


def test_down_ends_everything(own_place):
    lab = up(own_place, ONE)
    done = own_place.run("lab", "down")
    assert done.returncode == 0, done.stderr
    assert own_place.leftovers() == []
    assert own_place.run("lab", "down").returncode == 1
    assert not Path(lab["token"]).exists()


def test_down_removes_what_engines_of_killed_nodes_left(own_place):
    up(own_place, ONE)
    scratch = own_place.tmp / "hetero-scratch"
    scratch.mkdir()
    left = own_place.root / "lease" / "simulated-only-toynpu-0.lease"
    left.parent.mkdir(exist_ok=True)
    left.write_bytes(msgspec.json.encode(LeaseNote(replica="m-1", pid=1, scratch=str(scratch))))
    assert own_place.run("lab", "down").returncode == 0
    assert own_place.leftovers() == []


def test_a_killed_lab_leaves_no_process_and_no_file_and_can_be_started_again(own_place):
    lab = up(own_place, ONE)
    began = time.monotonic()
    os.kill(lab["pid"], signal.SIGKILL)
    wait_for(lambda: own_place.processes() == [], PATIENCE_S)
    assert time.monotonic() - began < 30.0
    assert list(own_place.tmp.iterdir()) == []
    up(own_place, ONE)
    assert own_place.run("lab", "down").returncode == 0
    assert own_place.leftovers() == []


def test_a_node_without_devices_fails_it_and_nothing_is_left(own_place):
    (own_place.root / "lab.yaml").write_text(f"{ONE[:-1]}, {{name: none, kind: nosuch}}]")
    done = own_place.run("lab", "up", str(own_place.root / "lab.yaml"), "-o", "json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (1, "HL402")
    assert "node none has no nosuch device" in error["message"]
    assert own_place.leftovers() == []


def test_the_heads_death_ends_it_with_the_reason(own_place):
    lab = up(own_place, ONE)
    (pid,) = [process.pid for process in own_place.processes() if is_node(process, "only")]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: own_place.processes() == [], PATIENCE_S)
    error = json.loads(Path(lab["log"]).read_text().splitlines()[-1])["error"]
    assert (error["code"], error["message"]) == ("HL411", "node only ended by itself; it was the head")
    own_place.run("node", "list")  # any command tidies up what the lab could not
    assert own_place.leftovers() == []
