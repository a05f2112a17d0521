"""A cluster of simulated nodes under a steady load: nodes join, are killed, come back, are drained; the scheduler dies.

What clients see is asserted each time: only requests that were being streamed by the lost node may end early, and then
with an error event.
"""

import os
import signal
import time

import psutil
import pytest
from steady_load import SteadyLoad

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

PATIENCE_S = 90.0
HERE = ("--kind", "sim", "--address-of-this-node", "127.0.0.1")


class Cluster:
    """Nodes as `node start` and `node join` processes, and a model with as many replicas as fit."""

    def __init__(self, sandbox, folder):
        self.box = sandbox
        self.nodes = {"n0": sandbox.start("node", "start", "--head", "--port", "0", *HERE, **self.env("n0"))}
        self.address = self.wait(lambda: self.box.json("node", "list")["address"] if self.alive() == {"n0"} else None)
        self.serve = sandbox.serve(str(folder), "--kind", "sim", "--replicas", "auto", "--max-model-len", "512")
        self.serve.wait_ready()
        self.model = self.serve.ready["models"][0]

    def env(self, name):
        return {
            "HETERO_LLM_NODE_NAME": name,
            "HETERO_LLM_SIM_NODE": name,
            "HETERO_LLM_SIM_DEVICES": "fast=1",
        }

    def join(self, name):
        self.nodes[name] = self.box.start("node", "join", self.address, *HERE, **self.env(name))

    def alive(self):
        done = self.box.run("node", "list", "-o", "json")
        if done.returncode != 0:
            return set()
        return {node["node"] for node in self.box.json("node", "list")["nodes"] if node["alive"]}

    def ready(self):
        """Return replica → node of those that are ready."""
        return {r["replica"]: r["node"] for r in self.serve.replicas() if r["state"] == "ready"}

    def wait_ready_on(self, *names):
        self.wait(lambda: sorted(self.ready().values()) == sorted(names))

    def wait(self, condition, deadline_s=PATIENCE_S):
        end = time.monotonic() + deadline_s
        while not (answer := condition()):
            assert time.monotonic() < end, f"not in {deadline_s} s; replicas: {self.serve.replicas()}"
            time.sleep(0.3)
        return answer

    def load(self):
        return SteadyLoad(self.serve.url, self.model)


@pytest.fixture(scope="module")
def cluster(module_sandbox, tiny_model):
    running = Cluster(module_sandbox, tiny_model("tiny-qwen2"))
    yield running
    running.serve.interrupt()
    assert running.serve.wait() == 130
    for node in reversed(list(running.nodes.values())):
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
            assert node.wait(90) == 130
    assert module_sandbox.leftovers() == []


def test_a_node_that_joins_is_used_by_itself_and_nobody_notices(cluster):
    with cluster.load() as load:
        for name in ("n1", "n2", "n3"):
            cluster.join(name)
        cluster.wait_ready_on("n0", "n1", "n2", "n3")
        load.wait_for_more(60)
        assert set(load.replicas(40)) == set(cluster.ready())
    assert load.failures() == []


def test_a_killed_node_costs_only_what_it_was_streaming(cluster):
    (lost,) = [replica for replica, node in cluster.ready().items() if node == "n3"]
    with cluster.load() as load:
        load.wait_for_more(20)
        os.kill(cluster.nodes["n3"].pid, signal.SIGKILL)
        cluster.wait(lambda: lost not in cluster.ready())
        load.wait_for_more(40)
        assert lost not in load.replicas(20)
    failed = load.failures()
    assert {outcome.replica for outcome in failed} <= {lost}
    assert {outcome.kind for outcome in failed} <= {"event"}
    assert all(outcome.tokens > 0 for outcome in failed)
    assert len(failed) <= 4, "no more than were in flight"


def test_a_node_that_comes_back_is_used_again(cluster):
    cluster.join("n3")
    with cluster.load() as load:
        cluster.wait_ready_on("n0", "n1", "n2", "n3")
        load.wait_for_more(40)
        assert len(load.replicas(30)) == 4
    assert load.failures() == []


def test_a_drained_node_is_empty_and_nobody_noticed(cluster):
    with cluster.load() as load:
        load.wait_for_more(20)
        refused = cluster.box.run("drain", "n2")
        assert refused.returncode == 1
        assert "HL412" in refused.stderr
        assert "n2" in cluster.ready().values()
    assert load.failures() == []


def test_ten_scheduler_restarts_cost_no_request(cluster):
    def scheduler():
        found = [p for p in cluster.box.processes() if p.cmdline()[:1] == ["ray::Scheduler"]]
        return found[0] if len(found) == 1 else None

    before = cluster.ready()
    with cluster.load() as load:
        for _ in range(10):
            process = cluster.wait(scheduler)
            process.kill()
            cluster.wait(lambda old=process.pid: (now := scheduler()) and now.pid != old)
            load.wait_for_more(5)
        load.wait_for_more(20)
    assert load.failures() == []
    assert cluster.ready() == before
    assert all(psutil.pid_exists(replica["actor_pid"]) for replica in cluster.serve.replicas())
