"""One endpoint for one model over unequal replicas: simulated cuda and ascend and a real CPU, on four nodes."""

import json
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

LAB = Path(__file__).parents[2] / "deploy" / "lab" / "mixed.yaml"
MODEL = "smollm2-135m"
CONFIG = {
    "models": [
        {
            "name": MODEL,
            "source": MODEL,
            "pools": [
                {"kind": "cuda", "accelerator": "H100-80GB", "replicas": 1},
                {"kind": "ascend", "accelerator": "910B2", "replicas": 2},
                {"kind": "cpu", "replicas": 1},
            ],
            "engine": {"max_model_len": 2048, "kv_cache_bytes": "128MiB"},
        }
    ]
}
PROMPTS = [f"Tell me about the number {number}." for number in range(20)]
REQUESTS, AT_ONCE = 200, 16


@pytest.fixture(scope="module")
def lab(module_sandbox):
    up = module_sandbox.run("lab", "up", str(LAB), timeout_s=240)
    assert up.returncode == 0, up.stderr
    yield module_sandbox
    down = module_sandbox.run("lab", "down", timeout_s=120)
    assert down.returncode == 0, down.stderr
    assert module_sandbox.leftovers() == []


@pytest.fixture(scope="module")
def serve(lab):
    config = lab.root / "mixed-pool.yaml"
    config.write_text(json.dumps(CONFIG))
    running = lab.serve("-f", str(config))
    running.wait_ready()
    yield running
    running.interrupt()
    assert running.wait() == 130


def test_the_nodes_of_the_lab_are_one_kind_each(lab, serve):
    nodes = lab.json("devices")["nodes"]
    kinds = {node["node"]: (node["kind"], {device["simulated"] for device in node["devices"]}) for node in nodes}
    assert Counter(kind for kind, _ in kinds.values()) == {"cuda": 1, "ascend": 2, "cpu": 1}
    assert dict(kinds.values()) == {
        "cuda": {True},
        "ascend": {True},
        "cpu": {False},
    }
    assert len({device["uid"] for node in nodes for device in node["devices"]}) == sum(
        len(node["devices"]) for node in nodes
    )


def test_200_requests_are_answered_by_all_kinds_and_the_simulated_ones_agree(serve):
    def ask(number):
        prompt = [{"role": "user", "content": PROMPTS[number % len(PROMPTS)]}]
        raw = client.chat.completions.with_raw_response.create(
            model=MODEL, messages=prompt, max_tokens=8, temperature=0
        )
        kind = raw.headers["x-hetero-kind"]
        assert raw.headers.get("x-hetero-simulated") == ("true" if kind != "cpu" else None)
        return number % len(PROMPTS), kind, raw.headers["x-hetero-replica"], raw.parse().choices[0].message.content

    with (
        openai.OpenAI(base_url=serve.ready["openai_base_url"], api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        answers = list(pool.map(ask, range(REQUESTS)))
    assert len(answers) == REQUESTS
    assert set(Counter(kind for _, kind, _, _ in answers)) == {"cuda", "ascend", "cpu"}
    assert len({replica for _, _, replica, _ in answers}) == 4
    texts = defaultdict(set)
    for prompt, kind, _, text in answers:
        if kind != "cpu":
            texts[prompt].add(text)
    assert {len(said) for said in texts.values()} == {1}
    assert len({next(iter(said)) for said in texts.values()}) == len(PROMPTS)


def test_each_engine_sees_its_own_devices_by_the_variable_of_its_kind(serve):
    seen = defaultdict(list)
    for replica in serve.replicas():
        environ = psutil.Process(replica["engine_pid"]).environ()
        seen[replica["kind"]].append(
            tuple(environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"))
        )
    assert seen["cuda"] == [("0", None)]
    assert [ascend for _, ascend in seen["ascend"]] == ["0", "0"]  # on two nodes, each its first
    assert seen["cpu"] == [(None, None)]


def test_everything_that_is_shown_says_simulated(lab, serve):
    assert "(simulated)" in serve.log
    status = lab.run("status")
    assert status.stdout.count("(simulated)") == 3
    assert lab.run("devices").stdout.count("(simulated)") >= 3
    pretended = {"HETERO_LLM_OVERRIDE_ASCEND": "count=1,type=910B2,engine=sim"}
    assert "(simulated)" in lab.run("plan", MODEL, "--kind", "ascend", **pretended).stdout
    with serve.client() as client:
        (card,) = client.get("/v1/models").json()["data"]
    assert card["hetero"]["simulated_replicas"] == 3
