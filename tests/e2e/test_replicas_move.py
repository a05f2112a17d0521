"""Replicas that must leave: to an equal device or whatever else was allowed; a drained node's before it leaves."""

import os
import signal

import pytest
from node_cluster import NodeCluster

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

NPU = {"HETERO_LLM_OVERRIDE_ASCEND": "count=1,type=910B2,memory=64GiB,engine=sim"}
GPU = {"HETERO_LLM_OVERRIDE_CUDA": "count=1,type=H100-80GB,memory=80GiB,engine=sim"}
NOTHING = {"HETERO_LLM_OVERRIDE_CPU": "count=0"}


@pytest.fixture(scope="module")
def cluster(module_sandbox, tiny_model):
    # The head has no device at all.
    running = NodeCluster(module_sandbox, "head", **NOTHING)
    running.join("npu-a", "ascend", **NPU)
    running.join("npu-b", "ascend", **NPU)
    running.join("gpu-a", "cuda", **GPU)
    running.wait(lambda: running.alive() >= {"npu-a", "npu-b", "gpu-a"})
    kinds = ("--kind", "ascend", "--kind", "cuda")
    running.deploy(str(tiny_model("tiny-qwen2")), *kinds, "--replicas", "1", "--max-model-len", "512")
    yield running
    running.end()


def test_p9_a_cluster_whose_head_has_no_device_serves(cluster):
    (node,) = cluster.ready().values()
    assert node.startswith("npu-")


def test_a_drained_nodes_replica_is_replaced_before_it_leaves(cluster):
    ((first, node),) = cluster.ready().items()
    other = {"npu-a": "npu-b", "npu-b": "npu-a"}[node]
    with cluster.load() as load:
        load.wait_for_more(20)
        drained = cluster.box.run("drain", node, timeout_s=120)
        assert drained.returncode == 0, drained.stderr
        assert f"{node} is drained" in drained.stderr
        load.wait_for_more(20)
    assert load.failures() == []
    assert list(cluster.ready().values()) == [other]
    assert first not in cluster.ready()
    assert cluster.nodes[node].wait(90) == 0, "with no work left it leaves by itself, which is no failure"


def test_a_lost_nodes_replica_moves_to_another_kind_that_was_allowed(cluster):
    (node,) = cluster.ready().values()
    os.kill(cluster.nodes[node].pid, signal.SIGKILL)
    cluster.nodes[node].wait()
    cluster.wait_ready_on("gpu-a")
    with cluster.serve.client() as client:
        answer = client.post("/v1/completions", json={"model": cluster.model, "prompt": "x", "max_tokens": 4})
        (card,) = client.get("/v1/models").json()["data"]
    assert (answer.status_code, answer.headers["x-hetero-kind"]) == (200, "cuda")
    assert card["hetero"]["ready_by_kind"] == {"ascend": 0, "cuda": 1}


def test_a_drained_nodes_replica_gets_its_successor_on_another_kind_first(cluster):
    (first,) = cluster.ready()
    cluster.join("npu-c", "ascend", **NPU)
    cluster.wait(lambda: "npu-c" in cluster.alive())
    with cluster.load() as load:
        load.wait_for_more(20)
        drained = cluster.box.run("drain", "gpu-a", timeout_s=120)
        assert drained.returncode == 0, drained.stderr
        # Draining itself may be over before the command looks again.
        assert drained.stderr.startswith(f"gpu-a: {first} ready\n")
        assert drained.stderr.endswith("gpu-a is drained\n")
        load.wait_for_more(20)
    assert load.failures() == []
    assert list(cluster.ready().values()) == ["npu-c"]
    assert cluster.nodes["gpu-a"].wait(90) == 0


def test_a_node_that_is_named_wrongly_cannot_be_drained(cluster):
    refused = cluster.box.run("drain", "nobody")
    assert refused.returncode == 1
    assert "HL408" in refused.stderr
    assert "npu-c" in refused.stderr


def test_a_label_that_was_asked_for_holds_also_when_the_replica_must_move(cluster, tiny_model):
    wanted = (str(tiny_model("tiny-mqa")), "--kind", "ascend", "--label", "rack=7", "--max-model-len", "512")
    refused = cluster.box.run("plan", *wanted)
    assert (refused.returncode, "rack=7 was asked for" in refused.stdout) == (1, True)
    cluster.join("npu-d", "ascend", "--label", "rack=7", **NPU)
    cluster.wait(lambda: "npu-d" in cluster.alive())
    labelled = cluster.box.serve(*wanted)
    labelled.wait_ready()
    assert labelled.url == cluster.serve.url, "one cluster, one address"
    assert f"this cluster has its gateway at {cluster.serve.url}" in labelled.log
    cluster.join("npu-e", "ascend", **NPU)
    cluster.wait(lambda: "npu-e" in cluster.alive())
    kept = cluster.box.run("drain", "npu-d")
    assert (kept.returncode, "HL412" in kept.stderr) == (1, True)
    assert [r["node"] for r in labelled.replicas() if r["model"] == labelled.ready["models"][0]] == ["npu-d"]
    labelled.interrupt()
    assert labelled.wait() == 130
