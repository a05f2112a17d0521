"""Four hosts with addresses of their own; the cable of one is pulled under load and put back."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import hosts
from sandbox import within

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.waits, pytest.mark.timeout(600)]

LOAD = Path(__file__).parents[1] / "support" / "steady_load.py"
NAMES = ("h0", "h1", "h2", "h3")
PATIENCE_S = 150.0


@pytest.fixture
def network():
    with hosts(NAMES) as made:
        yield made


@pytest.fixture
def cluster(sandbox, network, tiny_model):
    sandbox.netns = network.netns["h0"]
    running = Cluster(sandbox, network, tiny_model("tiny-qwen2"))
    yield running
    running.serve.interrupt()
    assert running.serve.wait() == 130
    for node in reversed(running.nodes.values()):
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
        node.wait(90)
    assert sandbox.leftovers() == []


class Cluster:
    def __init__(self, sandbox, network, folder):
        self.box, self.network = sandbox, network
        self.nodes = {}
        self.start("h0", "start", "--head", "--port", "6379")
        self.wait(lambda: self.alive() == {"h0"})
        for name in NAMES[1:]:
            self.join(name)
        self.wait(lambda: self.alive() == set(NAMES))
        self.serve = sandbox.serve(str(folder), "--kind", "sim", "--replicas", "auto", "--max-model-len", "512")
        self.serve.wait_ready()
        self.model = self.serve.ready["models"][0]

    def start(self, name, *verb):
        env = {"HETERO_LLM_NODE_NAME": name, "HETERO_LLM_SIM_NODE": name, "HETERO_LLM_SIM_DEVICES": "fast=1"}
        where = ("--kind", "sim", "--address-of-this-node", self.network.address[name])
        self.nodes[name] = self.box.start("node", *verb, *where, netns=self.network.netns[name], **env)

    def join(self, name):
        self.start(name, "join", f"{self.network.address['h0']}:6379")

    def alive(self):
        done = self.box.run("node", "list", "-o", "json")
        nodes = json.loads(done.stdout)["data"]["nodes"] if done.returncode == 0 else []
        return {node["node"] for node in nodes if node["alive"]}

    def ready(self):
        """Return node → replica of those that are ready."""
        replicas = self.box.json("status")["replicas"]
        return {replica["node"]: replica["replica"] for replica in replicas if replica["state"] == "ready"}

    def wait(self, condition, deadline_s=PATIENCE_S):
        end = time.monotonic() + deadline_s
        while not (answer := condition()):
            assert time.monotonic() < end, f"not in {deadline_s} s"
            time.sleep(0.5)
        return answer


class Load:
    """The steady load as a process on the first host."""

    def __init__(self, cluster):
        self.out = cluster.box.root / "load.jsonl"
        argv = [*within(cluster.box.netns), sys.executable, str(LOAD), cluster.serve.url, cluster.model]
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, env=cluster.box.env)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        assert self.process.wait(90) == 0

    def outcomes(self):
        return [json.loads(line) for line in self.out.read_text().splitlines() if line.endswith("}")]

    def failures(self):
        return [outcome for outcome in self.outcomes() if outcome["kind"] != "whole"]

    def wait_for_more(self, cluster, count):
        wanted = len(self.outcomes()) + count
        cluster.wait(lambda: len(self.outcomes()) >= wanted)


def test_a_pulled_cable_costs_what_was_being_streamed_and_the_node_comes_back(cluster, network):
    cluster.wait(lambda: set(cluster.ready()) == set(NAMES))
    lost = cluster.ready()["h3"]
    with Load(cluster) as load:
        load.wait_for_more(cluster, 40)
        assert load.failures() == []
        network.pull("h3")
        cluster.wait(lambda: "h3" not in cluster.alive())
        cluster.wait(lambda: "h3" not in cluster.ready())
        load.wait_for_more(cluster, 40)
        failed = load.failures()
        assert {(outcome["kind"], outcome["replica"]) for outcome in failed} <= {("event", lost)}
        assert all(outcome["tokens"] > 0 for outcome in failed)
        network.plug("h3")
        # Ray ends a node that it has given up; whoever keeps it, systemd for one, starts it anew.
        cluster.wait(lambda: cluster.nodes["h3"].poll() is not None)
        cluster.join("h3")
        cluster.wait(lambda: set(cluster.ready()) == set(NAMES))
        assert cluster.ready()["h3"] != lost, "the lost replica is not heard any more"
        load.wait_for_more(cluster, 40)
        assert cluster.ready()["h3"] in {outcome["replica"] for outcome in load.outcomes()[-40:]}
        assert load.failures() == failed
