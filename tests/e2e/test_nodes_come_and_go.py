"""A cluster of simulated nodes under a steady load: nodes join, are killed, come back, are drained; the scheduler dies.

What clients see is asserted each time: only requests that were being streamed by the lost node may end early, and then
with an error event.
"""

import os
import signal

import psutil
import pytest
from node_cluster import NodeCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

FAST = {"HETERO_LLM_SIM_DEVICES": "fast=1"}


@pytest.fixture(scope="module")
def cluster(module_sandbox, tiny_model):
    running = NodeCluster(module_sandbox, "n0", "sim", **FAST)
    running.deploy(str(tiny_model("tiny-qwen2")), "--kind", "sim", "--replicas", "auto", "--max-model-len", "512")
    yield running
    running.end()


def test_a_node_that_joins_is_used_by_itself_and_nobody_notices(cluster):
    with cluster.load() as load:
        for name in ("n1", "n2", "n3"):
            cluster.join(name, "sim", **FAST)
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
    cluster.join("n3", "sim", **FAST)
    with cluster.load() as load:
        cluster.wait_ready_on("n0", "n1", "n2", "n3")
        load.wait_for_more(40)
        assert len(load.replicas(30)) == 4
    assert load.failures() == []


def test_a_node_whose_replicas_have_no_other_place_is_not_drained(cluster):
    with cluster.load() as load:
        load.wait_for_more(20)
        refused = cluster.box.run("drain", "n2")
        assert refused.returncode == 1
        assert "HL412" in refused.stderr
        assert "n2" in cluster.ready().values()
        head = cluster.box.run("drain", "n0", "--force")
        assert (head.returncode, "n0 is the head" in head.stderr) == (1, True)
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
