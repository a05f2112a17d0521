"""One replica of a real model over two CPU nodes gives the tokens of one on a single device."""

import os
import signal
import time

import pytest

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores, one per node"),
]

HERE = ("--kind", "cpu", "--address-of-this-node", "127.0.0.1")
SIZES = ("--max-model-len", "512", "--kv-cache-bytes", "64MiB")
PROMPTS = ("A pool of unequal", "The router sends each", "Count from one", "7 8 9")


@pytest.fixture
def two_nodes(sandbox):
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


def greedy(serve):
    """Return per prompt the greedy token ids and their log-probabilities."""
    results = []
    with serve.client() as client:
        for prompt in PROMPTS:
            body = {"model": serve.ready["models"][0], "prompt": prompt, "temperature": 0, "max_tokens": 32}
            answer = client.post("/v1/completions", json={**body, "logprobs": 1, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            results.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return results


def test_tp2_over_two_nodes_gives_the_tokens_of_tp1(sandbox, two_nodes, tiny_model):
    folder = str(tiny_model("tiny-qwen2"))
    results = {}
    for tp in ("1", "2"):
        serve = sandbox.serve(folder, "--kind", "cpu", "--tp", tp, *SIZES)
        serve.wait_ready()
        (replica,) = serve.replicas()
        assert (replica["tp"], len(replica["devices"])) == (int(tp), int(tp))
        measured = replica["group_bandwidth_bytes_per_s"]
        assert (measured is None) if tp == "1" else (measured > 0)
        results[tp] = greedy(serve)
        serve.interrupt()
        assert serve.wait() == 130
    for (tokens_1, logprobs_1), (tokens_2, logprobs_2) in zip(results["1"], results["2"], strict=True):
        assert len(tokens_1) == 32
        assert tokens_1 == tokens_2
        assert logprobs_1 == pytest.approx(logprobs_2, abs=0.05)
