"""Several replicas and tensor parallelism on one node, with a seeded random model."""

import os
import time
from itertools import combinations

import pytest
from greedy import SIZES, assert_same, greedy
from sandbox import engine_tree

pytestmark = [
    pytest.mark.ray,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPU cores"),
]

ONE_CORE_EACH = {"HETERO_LLM_CPU_CORES_PER_DEVICE": "1"}


def planned_kv_tokens(sandbox, folder, tp):
    words = ("plan", folder, "--kind", "cpu", "--tp", str(tp), *SIZES)
    (replica,) = sandbox.json(*words, **ONE_CORE_EACH)["replicas"]
    return replica["kv_tokens"]


def test_tp2_gives_the_greedy_tokens_of_tp1_and_both_have_the_cache_that_was_planned(
    sandbox, tiny_model, on_one_device
):
    folder = str(tiny_model("tiny-qwen2"))
    serve = sandbox.serve(folder, "--kind", "cpu", "--tp", "2", *SIZES, env=ONE_CORE_EACH)
    serve.wait_ready()
    (pair,) = serve.replicas()
    tokens = greedy(serve)
    serve.interrupt()
    assert serve.wait() == 130
    assert sandbox.leftovers() == []
    expected, single = on_one_device
    assert_same(expected, tokens)
    for replica, tp in ((single, 1), (pair, 2)):
        assert (replica["tp"], len(replica["devices"])) == (tp, tp)
        assert planned_kv_tokens(sandbox, folder, tp) == pytest.approx(replica["kv_tokens"], rel=0.05)


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
