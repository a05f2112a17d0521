"""A mixed box: eight pretended GPUs and eight pretended NPUs, two TP=4 replicas on each; what every engine sees.

Only the driver and the engine are pretended: plan, Ray's ids, environment and group code are the real backends'.
"""

import json
from collections import defaultdict

import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

BOX = {
    "HETERO_LLM_OVERRIDE_CUDA": "count=8,type=H100-80GB,memory=80GiB,engine=sim",
    "HETERO_LLM_OVERRIDE_ASCEND": "count=8,type=910B2,memory=64GiB,engine=sim",
    # Left over from somebody's shell: neither may reach an engine of the other vendor.
    "RANK_TABLE_FILE": "/no/such/table.json",
}


@pytest.fixture(scope="module")
def serve(module_sandbox, tiny_model):
    config = module_sandbox.root / "box.yaml"
    pools = [{"kind": kind, "tp": 4, "replicas": 2} for kind in ("cuda", "ascend")]
    model = {"name": "m", "source": str(tiny_model("tiny-qwen2")), "pools": pools}
    config.write_text(json.dumps({"models": [model]}))
    running = module_sandbox.serve("-f", str(config), env=BOX)
    running.wait_ready()
    yield running
    running.interrupt()
    assert running.wait() == 130
    assert module_sandbox.leftovers() == []


@pytest.fixture(scope="module")
def engines(serve):
    """Return kind → (status, environment) of its replicas."""
    found = defaultdict(list)
    for replica in serve.replicas():
        found[replica["kind"]].append((replica, psutil.Process(replica["engine_pid"]).environ()))
    return found


@pytest.mark.parametrize(
    ("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("ascend", "ASCEND_RT_VISIBLE_DEVICES")]
)
def test_two_replicas_see_disjoint_ascending_devices(engines, kind, variable):
    seen = [environ[variable].split(",") for _, environ in engines[kind]]
    assert [len(ids) for ids in seen] == [4, 4]
    assert all(ids == sorted(ids, key=int) for ids in seen)
    assert sorted(int(one) for ids in seen for one in ids) == list(range(8))


def test_the_status_says_which_rank_has_which_device(engines):
    for kind, variable in (("cuda", "CUDA_VISIBLE_DEVICES"), ("ascend", "ASCEND_RT_VISIBLE_DEVICES")):
        for replica, environ in engines[kind]:
            assert [uid.rpartition("-")[2] for uid in replica["devices"]] == environ[variable].split(",")


def test_no_variable_of_the_other_vendor_and_none_left_over_reaches_an_engine(engines):
    for _, environ in engines["cuda"]:
        assert not {"ASCEND_RT_VISIBLE_DEVICES", "RANK_TABLE_FILE"} & environ.keys()
    for _, environ in engines["ascend"]:
        assert not {"CUDA_VISIBLE_DEVICES", "RANK_TABLE_FILE"} & environ.keys()


def test_two_groups_on_one_host_have_port_windows_of_their_own(engines):
    ports = [int(environ["HCCL_IF_BASE_PORT"]) for _, environ in engines["ascend"]]
    assert len(set(ports)) == 2


def test_a_mixed_box_is_one_node_per_kind_with_one_host(module_sandbox, serve):
    nodes = module_sandbox.json("node", "list")["nodes"]
    # The machine's own CPU is a kind too.
    assert sorted(node["kind"] for node in nodes) == ["ascend", "cpu", "cuda"]
    assert len({node["host"] for node in nodes}) == 1
    assert len({node["ray_node_id"] for node in nodes}) == 3


def test_the_engines_answer(serve):
    with serve.client() as client:
        answers = [client.post("/v1/completions", json={"model": "m", "prompt": f"n {n}"}) for n in range(8)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-hetero-simulated"] for answer in answers} == {"true"}
