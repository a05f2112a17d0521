"""Several replicas and tensor parallelism on one node, with a seeded random model."""

import os
import time
from itertools import combinations

import pytest
from sandbox import engine_tree

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores"),
]

PROMPTS = ("A pool of unequal", "The router sends each", "Count from one", "7 8 9")
ONE_CORE_EACH = {"HETERO_LLM_CPU_CORES_PER_DEVICE": "1"}
SIZES = ("--max-model-len", "512", "--kv-cache-bytes", "64MiB")


def greedy(serve, name):
    """Return per prompt the greedy token ids and their log-probabilities."""
    results = []
    with serve.client() as client:
        for prompt in PROMPTS:
            body = {"model": name, "prompt": prompt, "temperature": 0, "max_tokens": 32, "logprobs": 1}
            answer = client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            results.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return results


def test_tp2_gives_the_greedy_tokens_of_tp1(sandbox, tiny_model):
    folder = tiny_model("tiny-qwen2")
    results = {}
    for tp in ("1", "2"):
        serve = sandbox.serve(str(folder), "--kind", "cpu", "--tp", tp, *SIZES, env=ONE_CORE_EACH)
        serve.wait_ready()
        (replica,) = serve.replicas()
        assert (replica["tp"], len(replica["devices"])) == (int(tp), int(tp))
        results[tp] = greedy(serve, serve.ready["models"][0])
        serve.interrupt()
        assert serve.wait() == 130
        assert sandbox.leftovers() == []
    for (tokens_1, logprobs_1), (tokens_2, logprobs_2) in zip(results["1"], results["2"], strict=True):
        assert len(tokens_1) == 32
        assert tokens_1 == tokens_2
        assert logprobs_1 == pytest.approx(logprobs_2, abs=0.05)


def test_two_replicas_hold_disjoint_cores_and_a_third_is_refused(sandbox, tiny_model):
    folder = str(tiny_model("tiny-qwen2"))
    cores = len(os.sched_getaffinity(0))
    serve = sandbox.serve(folder, "--kind", "cpu", "--replicas", "2", *SIZES, env=ONE_CORE_EACH)
    serve.wait_ready()
    replicas = serve.replicas()
    assert [replica["state"] for replica in replicas] == ["ready", "ready"]
    pinned = [
        {core for process in engine_tree(replica["actor_pid"]) for core in process.cpu_affinity()}
        for replica in replicas
    ]
    assert all(one.isdisjoint(other) for one, other in combinations(pinned, 2))
    assert [set(replica["cores"]) for replica in replicas] == pinned

    began = time.monotonic()
    plan = sandbox.run("plan", folder, "--kind", "cpu", "--replicas", str(cores - 1), **ONE_CORE_EACH)
    assert time.monotonic() - began < 5.0
    assert plan.returncode == 1
    assert "in-use" in plan.stdout
    assert f"2 of {cores} devices" in plan.stdout

    with serve.client() as client:
        served = {
            client.post(
                "/v1/completions", json={"model": serve.ready["models"][0], "prompt": "x", "max_tokens": 1}
            ).headers["x-hetero-replica"]
            for _ in range(10)
        }
    assert served == {replica["replica"] for replica in replicas}

    stopped = sandbox.run("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert serve.wait() == 0
    assert sandbox.leftovers() == []


def test_a_third_replica_on_two_devices_is_refused_before_anything_starts(sandbox, tiny_model):
    cores = len(os.sched_getaffinity(0))
    began = time.monotonic()
    done = sandbox.run(
        "serve", str(tiny_model("tiny-qwen2")), "--kind", "cpu", "--replicas", str(cores + 1), **ONE_CORE_EACH
    )
    assert time.monotonic() - began < 5.0
    assert done.returncode == 1
    assert "error[HL305]" in done.stderr
    assert "rule count" in done.stderr
    assert f"{cores + 1}" in done.stderr
    assert sandbox.leftovers() == []
