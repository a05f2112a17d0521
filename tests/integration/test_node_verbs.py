"""`node start`, `join`, `list`, `leave` and `adopt` as commands of several machines, all of them this one."""

import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from local_cluster import wait_for
from sandbox import Sandbox

from hetero_llm.inventory.node import local_address

pytestmark = pytest.mark.ray

PATIENCE_S = 60.0
LOOPBACK = ("--address-of-this-node", "127.0.0.1")


class Machine:
    """A place of its own for commands, with two pretended devices of one kind."""

    def __init__(self, name, kind):
        self.box = Sandbox(Path("unused"), engines=False)
        self.kind = kind
        self.env = {
            "HETERO_LLM_NODE_NAME": name,
            f"HETERO_LLM_OVERRIDE_{kind.upper()}": "count=2,type=T1,memory=1GiB",
        }
        self._log = self.box.root / "node.log"
        self.process = None

    def start(self, *words):
        argv = [sys.executable, "-m", "hetero_llm.cli", "node", *words]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                argv, env={**self.box.env, **self.env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def said(self, text):
        """Return what the running command has said once it has said `text`."""

        def heard():
            assert self.process.poll() is None, self.log
            return text in self.log

        wait_for(heard, PATIENCE_S)
        return self.log

    @property
    def log(self):
        return self._log.read_text()

    def run(self, *words, **env):
        return self.box.run("node", *words, **{**self.env, **env})

    def nodes(self, **env):
        return self.box.json("node", "list", **env)

    def close(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE_S)
        left = self.box.leftovers()
        self.box.close()
        assert left == []


@pytest.fixture
def machine():
    made = []

    def make(name, kind):
        made.append(Machine(name, kind))
        return made[-1]

    yield make
    for one in reversed(made):
        one.close()


def start_head(one, *words):
    one.start("start", "--head", "--port", "0", "--kind", one.kind, *words)
    text = one.said("other machines:")
    one.address = text.split("cluster: ")[1].split()[0]
    one.token = text.rsplit("a copy of ", 1)[1].strip()
    return one


@pytest.fixture
def head(machine):
    return start_head(machine("head", "toygpu"), *LOOPBACK)


def test_a_machine_joins_with_the_token_and_leaves_by_command(head, machine):
    other = machine("other", "toynpu")
    other.start("join", head.address, "--token-file", head.token, "--kind", "toynpu", "--label", "rack=7")
    other.said("node other joined: 2 x toynpu T1 (simulated)")
    nodes = {node["node"]: node for node in head.nodes()["nodes"]}
    assert {name: (node["kind"], node["alive"]) for name, node in nodes.items()} == {
        "head": ("toygpu", True),
        "other": ("toynpu", True),
    }
    assert nodes["other"]["labels"] == {"rack": "7"}
    assert {node["node"] for node in other.nodes()["nodes"]} == {"head", "other"}
    assert other.run("leave").returncode == 0
    assert other.process.wait(PATIENCE_S) == 130
    assert other.box.leftovers() == []
    assert [node["node"] for node in head.nodes()["nodes"]] == ["head"]


def test_a_machine_without_the_token_is_refused_with_nothing_started(head, machine):
    other = machine("other", "toynpu")
    done = other.run("join", head.address, "--kind", "toynpu")
    assert done.returncode == 2
    assert "--token-file FILE" in done.stderr
    assert other.box.leftovers() == []


def test_leaving_with_the_head_ends_the_cluster_and_the_token_stays_for_the_next(head):
    assert head.run("leave").returncode == 0
    assert head.process.wait(PATIENCE_S) == 130
    assert head.box.leftovers() == []
    assert Path(head.token).exists()
    assert head.run("list").returncode == 1


def test_a_second_start_of_one_machine_is_refused(head):
    done = head.run("start", "--head", "--port", "0", *LOOPBACK, "--kind", "toygpu")
    assert (done.returncode, "HL410" in done.stderr) == (1, True)
    assert [node["alive"] for node in head.nodes()["nodes"]] == [True]


def test_a_killed_join_leaves_no_process_and_its_machine_joins_again_at_once(head, machine):
    other = machine("other", "toynpu")
    words = ("join", head.address, "--token-file", head.token, "--kind", "toynpu")
    other.start(*words)
    other.said("joined")
    other.process.send_signal(signal.SIGKILL)
    other.process.wait(PATIENCE_S)
    wait_for(lambda: other.box.processes() == [], PATIENCE_S)
    other.start(*words)
    other.said("joined")
    assert {node["node"]: node["alive"] for node in head.nodes()["nodes"]} == {"head": True, "other": True}


@pytest.mark.skipif(local_address() == "127.0.0.1", reason="`ray start` does not take loopback for an address")
def test_a_plain_ray_node_is_listed_with_advice_and_adopted(machine):
    head = start_head(machine("head", "toygpu"))
    other = machine("other", "toynpu")
    token = {"RAY_AUTH_TOKEN_PATH": head.token, "RAY_AUTH_MODE": "token"}
    printed = other.run("env", "--kind", "toynpu").stdout
    told = dict(shlex.split(line)[1].split("=", 1) for line in printed.splitlines())
    ray = Path(sys.executable).parent / "ray"
    argv = [str(ray), "start", "--address", head.address, "--block"]
    argv += ["--temp-dir", str(other.box.tmp / "r"), "--dashboard-agent-listen-port", "0", "--labels", "zone=a"]
    env = {**other.box.env, **other.env, **told, **token, "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: head.nodes()["unregistered"], PATIENCE_S)
            (plain,) = head.nodes()["unregistered"]
            assert plain["resources"] == {"hetero_toynpu": 2.0, "hetero_toynpu:T1": 2.0}
            assert any("hetero-llm node adopt" in step for step in plain["next"])
            done = other.run("adopt", "--address", head.address, **token)
            assert done.returncode == 0, done.stderr
            listed = head.nodes()
            assert listed["unregistered"] == []
            (adopted,) = [node for node in listed["nodes"] if node["kind"] == "toynpu"]
            assert (adopted["alive"], adopted["labels"], len(adopted["devices"])) == (True, {"zone": "a"}, 2)
            again = other.run("adopt", "--address", head.address, **token)
            assert (again.returncode, "HL408" in again.stderr) == (1, True)
        finally:
            process.terminate()
    wait_for(lambda: other.box.processes() == [], PATIENCE_S)
    for path in other.box.tmp.iterdir():
        shutil.rmtree(path)  # Ray's own
