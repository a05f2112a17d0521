"""`serve` on a lab: found without being told, left in order, and ended with it."""

import json
import socket

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LAB = """\
nodes:
  - {name: head, kind: sim, devices: "fast=1"}
  - {name: npu-a, kind: ascend, devices: "count=2,type=910B2,memory=64GiB,engine=sim"}
"""


@pytest.fixture(scope="module")
def lab(module_sandbox):
    (module_sandbox.root / "lab.yaml").write_text(LAB)
    up = module_sandbox.run("lab", "up", str(module_sandbox.root / "lab.yaml"), timeout_s=200.0)
    assert up.returncode == 0, up.stderr
    return module_sandbox


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_joins_by_itself_and_takes_its_gateway_along_when_it_ends(lab, tiny_model):
    serve = lab.serve(str(tiny_model("tiny-qwen2")), "--kind", "ascend", "--max-model-len", "512")
    serve.wait_ready()
    port = int(serve.url.rpartition(":")[2])
    assert {replica["node"] for replica in serve.replicas()} == {"npu-a"}
    assert "joining the cluster at 127.0.0.1:" in serve.log
    serve.interrupt()
    assert serve.wait() == 130
    assert not listens(port)
    assert all(node["alive"] for node in lab.json("node", "list")["nodes"])


def test_a_model_that_is_served_already_is_refused_and_the_first_goes_on(lab, tiny_model):
    words = (str(tiny_model("tiny-qwen2")), "--max-model-len", "512")
    serve = lab.serve(*words, "--kind", "ascend")
    serve.wait_ready()
    second = lab.run("serve", *words, "--kind", "sim", "--port", "0", "-o", "json")
    assert (second.returncode, json.loads(second.stdout)["error"]["code"]) == (1, "HL410")
    assert [(replica["kind"], replica["state"]) for replica in serve.replicas()] == [("ascend", "ready")]
    serve.interrupt()
    assert serve.wait() == 130


def test_a_second_serve_shares_the_address_and_takes_only_its_own_model_away(lab, tiny_model):
    def models():
        with serve.client() as client:
            return {entry["id"] for entry in client.get("/v1/models").json()["data"]}

    def answers(model):
        with serve.client() as client:
            body = {"model": model, "prompt": "7 8 9", "max_tokens": 3}
            return client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3

    serve = lab.serve(str(tiny_model("tiny-qwen2")), "--kind", "ascend", "--max-model-len", "512")
    serve.wait_ready()
    joined = lab.serve(str(tiny_model("tiny-mqa")), "--kind", "sim", "--max-model-len", "512")
    assert joined.wait_ready()["url"] == serve.url
    assert models() == {"tiny-qwen2", "tiny-mqa"}
    assert answers("tiny-qwen2")
    assert answers("tiny-mqa")
    joined.interrupt()
    assert joined.wait() == 130
    assert models() == {"tiny-qwen2"}
    assert answers("tiny-qwen2")
    serve.interrupt()
    assert serve.wait() == 130


def test_a_local_cluster_can_be_asked_for_although_there_is_a_lab(lab, tiny_model):
    folder = str(tiny_model("tiny-qwen2"))
    env = {"HETERO_LLM_SIM_DEVICES": "fast=1", "HETERO_LLM_SIM_NODE": "mine"}
    serve = lab.serve(folder, "--kind", "sim", "--max-model-len", "512", "--address", "local", env=env)
    serve.wait_ready()
    assert "starting a local cluster" in serve.log
    done = lab.run("node", "list")
    assert (done.returncode, "2 clusters run on this machine" in done.stderr) == (1, True)
    serve.interrupt()
    assert serve.wait() == 130


def test_ending_the_lab_ends_what_is_served_on_it_in_order_and_leaves_nothing(lab, tiny_model):
    # The last of this module: it ends the lab the other tests use.
    serve = lab.serve(str(tiny_model("tiny-qwen2")), "--kind", "sim", "--max-model-len", "512")
    serve.wait_ready()
    down = lab.run("lab", "down")
    assert down.returncode == 0, down.stderr
    assert serve.wait() == 130
    assert "failed" not in serve.log
    assert lab.leftovers() == []
