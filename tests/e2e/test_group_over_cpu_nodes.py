"""One replica of a real model over two CPU nodes gives the tokens of one on a single device."""

import os
import signal
import time

import pytest
from greedy import SIZES, assert_same, greedy

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores, one per node"),
]

HERE = ("--kind", "cpu", "--address-of-this-node", "127.0.0.1")


@pytest.fixture
def two_nodes(sandbox, on_one_device):
    """A cluster of two CPU nodes with one core each."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]
    nodes = []

    def start(name, core, *verb):
        env = {"HETERO_LLM_NODE_NAME": name, "HETERO_LLM_CPU_CORES_PER_DEVICE": "1"}
        nodes.append(sandbox.start("node", *verb, *HERE, cores=core, **env))

    def listed(count):
        end = time.monotonic() + 90
        while True:
            done = sandbox.run("node", "list", "-o", "json")
            if done.returncode == 0:
                found = sandbox.json("node", "list")
                if len(found["nodes"]) == count:
                    return found
            assert time.monotonic() < end, done.stderr
            time.sleep(0.5)

    start("c0", cores[0], "start", "--head", "--port", "0")
    address = listed(1)["address"]
    start("c1", cores[1], "join", address)
    yield listed(2)
    for node in reversed(nodes):
        node.send_signal(signal.SIGTERM)
        assert node.wait(90) == 130
    assert sandbox.leftovers() == []


def test_tp2_over_two_nodes_gives_the_tokens_of_tp1(sandbox, two_nodes, tiny_model, on_one_device):
    serve = sandbox.serve(str(tiny_model("tiny-qwen2")), "--kind", "cpu", "--tp", "2", *SIZES)
    serve.wait_ready()
    (replica,) = serve.replicas()
    assert (replica["tp"], len(replica["devices"])) == (2, 2)
    assert replica["group_bandwidth_bytes_per_s"] > 0
    tokens = greedy(serve)
    serve.interrupt()
    assert serve.wait() == 130
    expected, single = on_one_device
    assert single["group_bandwidth_bytes_per_s"] is None
    assert_same(expected, tokens)
