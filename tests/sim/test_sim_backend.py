"""The simulated backend keeps what the plugin API promises."""

import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from importlib.metadata import entry_points

import pytest
from hetero_llm_sim.plugin import SimBackend
from hetero_llm_sim.profile import ProfileInvalid, load_profiles

from hetero_llm.cluster.engine_process import EngineProcess
from hetero_llm.plugin import (
    API_VERSION,
    Device,
    EngineSpec,
    GroupSpec,
    Health,
    ModelFacts,
    PoolWish,
    RankSpec,
)
from hetero_llm.plugin.manager import load_plugins
from hetero_llm.plugin.rootcause import find_root_cause

BACKEND = SimBackend()
FACTS = ModelFacts(
    name="m",
    source="m",
    architecture="X",
    parameters=1,
    weights_bytes=1,
    layers=1,
    heads=4,
    kv_heads=4,
    head_dim=16,
    hidden_size=64,
    vocab_size=100,
    max_model_len=8192,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HETERO_LLM_SIM_")]:
        monkeypatch.delenv(name)


def discover(monkeypatch, devices):
    monkeypatch.setenv("HETERO_LLM_SIM_DEVICES", devices)
    return BACKEND.discover()


def device(index, accelerator="fast"):
    return Device(kind="sim", accelerator=accelerator, uid=f"sim-x-{index}", index=index, simulated=True)


def spec(**more):
    values = {"model_path": "/models/m", "served_name": "m", "devices": (device(0),), "tp": 1, "pp": 1}
    values |= {"host": "127.0.0.1", "port": 0, "max_model_len": 8192}
    return EngineSpec(**values | more)


# -- the plugin --------------------------------------------------------------------------------------------------------


def test_it_is_found_through_the_entry_point_like_any_vendors():
    (entry,) = entry_points(group="hetero_llm.backends", name="sim")
    assert entry.dist.name == "hetero-llm-sim"
    record = next(record for record in load_plugins().records() if record.name == "sim")
    assert (record.status, record.kind, record.api_version) == ("loaded", "sim", API_VERSION)


def test_importing_it_loads_no_event_loop_and_nothing_heavy():
    code = (
        "import sys, hetero_llm_sim.plugin as p; p.SimBackend().discover();"
        "print(sorted({'torch', 'vllm', 'ray', 'numpy', 'uvloop', 'httptools'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_core_does_not_import_it():
    code = "import sys, hetero_llm.plugin.manager as m; print('hetero_llm_sim' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


# -- devices -----------------------------------------------------------------------------------------------------------


def test_without_a_list_there_is_no_device_and_no_problem():
    found = BACKEND.discover()
    assert (found.devices, found.problems) == ((), ())


def test_a_list_gives_devices_of_several_types_marked_as_simulated(monkeypatch):
    found = discover(monkeypatch, "fast, mid=2")
    assert [(d.accelerator, d.index, d.health) for d in found.devices] == [
        ("fast", 0, Health.OK),
        ("mid", 1, Health.OK),
        ("mid", 2, Health.OK),
    ]
    assert all(d.simulated and d.kind == "sim" and d.memory_bytes for d in found.devices)
    assert len({d.uid for d in found.devices}) == 3


def test_a_failed_device_is_listed_as_failed_and_renumbers_nobody(monkeypatch):
    found = discover(monkeypatch, "fast,slow:failed,fast")
    assert [(d.index, d.health) for d in found.devices] == [(0, "ok"), (1, "failed"), (2, "ok")]


def test_an_unknown_type_is_a_problem_and_the_others_keep_their_numbers(monkeypatch):
    found = discover(monkeypatch, "fast,nonesuch=2,slow")
    assert [(d.accelerator, d.index) for d in found.devices] == [("fast", 0), ("slow", 3)]
    (problem,) = found.problems
    assert "no profile 'nonesuch'" in problem.text
    assert problem.next


@pytest.mark.parametrize("entry", ["fast=many", "fast:broken", "a b", "=2"])
def test_an_entry_that_cannot_be_read_is_a_problem(monkeypatch, entry):
    found = discover(monkeypatch, f"slow,{entry}")
    assert len(found.devices) == 1
    assert "is not TYPE[:HEALTH][=COUNT]" in found.problems[0].text


def test_nodes_on_one_host_have_different_devices(monkeypatch):
    here = discover(monkeypatch, "fast")
    monkeypatch.setenv("HETERO_LLM_SIM_NODE", "node/b")
    there = discover(monkeypatch, "fast")
    assert there.devices[0].uid == "sim-node-b-0"
    assert here.devices[0].uid != there.devices[0].uid


# -- profiles ----------------------------------------------------------------------------------------------------------


def test_a_file_adds_profiles_and_lists_devices(monkeypatch, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "profiles:\n  turbo: {like: fast, base_s: 0.001}\ndevices:\n  - {type: turbo, count: 2}\n  - {type: slow}\n"
    )
    monkeypatch.setenv("HETERO_LLM_SIM_PROFILES", str(path))
    assert [d.accelerator for d in BACKEND.discover().devices] == ["turbo", "turbo", "slow"]
    turbo, fast = load_profiles().find("turbo"), load_profiles("").find("fast")
    assert (turbo.base_s, turbo.slope_s) == (0.001, fast.slope_s)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("profiles: {x: {like: fast, speed: 3}}", "unknown field `speed`"),
        ("profiles: {x: {base_s: 1}}", "missing required field"),
        ("profiles: {x: {like: fast, max_batch: 0}}", "max_batch must be above 0"),
        ("profiles: {x: {like: y}, y: {like: x}}", "itself or not there"),
        ("profiles: {x: {like: fast, base_s: quick}}", "Expected `float`"),
        ("profiles: [x]", "must be a dict"),
        ("proflies: {}", "must hold 'profiles' and 'devices' only"),
        ("profiles: {", "is not YAML"),
    ],
)
def test_a_file_that_is_not_sound_says_why(tmp_path, text, said):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ProfileInvalid, match=said) as raised:
        load_profiles(str(path))
    assert "bad.yaml" in str(raised.value)


def test_a_missing_file_is_a_problem_of_discovery_and_fails_the_doctor(monkeypatch, tmp_path):
    monkeypatch.setenv("HETERO_LLM_SIM_PROFILES", str(tmp_path / "none.yaml"))
    assert "cannot read" in BACKEND.discover().problems[0].text
    failed = [check for check in BACKEND.doctor() if check.ok is False]
    assert {check.name for check in failed} == {"sim.profiles", "sim.devices"}
    assert all(check.next for check in failed)


def test_the_doctor_reminds_of_faults_that_are_on(monkeypatch):
    assert all(check.ok for check in BACKEND.doctor())
    monkeypatch.setenv("HETERO_LLM_SIM_FAULTS", "hang")
    (check,) = (check for check in BACKEND.doctor() if check.name == "sim.faults")
    assert (check.ok, check.next) == (None, ("unset HETERO_LLM_SIM_FAULTS",))


# -- planning ----------------------------------------------------------------------------------------------------------


def test_any_dtype_and_head_size_will_do():
    assert BACKEND.check_model(FACTS, "fast", PoolWish()) == ()


def test_a_context_longer_than_the_kv_cache_is_refused_with_both_numbers():
    (rejection,) = BACKEND.check_model(FACTS, "slow", PoolWish(max_model_len=50_000))
    assert rejection.rule == "memory"
    assert "50000" in rejection.reason
    assert "40960" in rejection.reason
    assert BACKEND.check_model(FACTS, "slow", PoolWish(max_model_len=50_000, tp=2)) == ()


def test_a_type_without_a_profile_is_refused():
    (rejection,) = BACKEND.check_model(FACTS, "nonesuch", PoolWish())
    assert "no profile 'nonesuch'" in rejection.reason


# -- groups and engines ------------------------------------------------------------------------------------------------


def test_each_rank_of_a_group_sees_its_own_device():
    ranks = tuple(RankSpec(rank=n, node="x", address="127.0.0.1", device=device(n + 2)) for n in range(2))
    setup = BACKEND.group(GroupSpec(ranks=ranks, tp=2, pp=1, master_address="127.0.0.1", master_port=1))
    assert [env["SIM_VISIBLE_DEVICES"] for env in setup.rank_env] == ["2", "3"]
    assert setup.preflight_argv is None
    assert setup.torch_backend == "sim"


def test_settings_reach_the_engine_although_the_core_keeps_its_own_variables_back(monkeypatch):
    monkeypatch.setenv("HETERO_LLM_SIM_FAULTS", "hang:skip=1")
    assert BACKEND.engine(spec()).env["HETERO_LLM_SIM_FAULTS"] == "hang:skip=1"


def test_options_and_extra_flags_come_last():
    launch = BACKEND.engine(spec(options={"speed": 10}, extra_args=("--max-num-seqs", "4")))
    assert launch.argv[-4:] == ("--speed", "10", "--max-num-seqs", "4")


def test_the_other_nodes_of_a_group_serve_nothing():
    launch = BACKEND.engine(spec(devices=(device(0), device(1)), pp=2, node_count=2, node_rank=1))
    assert launch.headless
    assert "--headless" in launch.argv
    assert launch.env["SIM_VISIBLE_DEVICES"] == "1"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def launched(tmp_path):
    """Start engines as the core does, and end them."""
    started = []

    def launch(**more):
        port = free_port()
        engine = EngineProcess(
            BACKEND.engine(spec(port=port, **more)),
            replica="m-sim-1",
            address=("127.0.0.1", port),
            served_name="m",
            log_path=tmp_path / "engine.log",
        )
        started.append(engine)
        return engine

    yield launch
    for engine in started:
        engine.stop()


def test_the_core_starts_it_sees_its_phases_and_gets_its_first_token(launched):
    engine = launched()
    engine.wait_ready(threading.Event())
    assert engine.phase == "ready"
    assert engine.facts == {"kv_tokens": 400_000}
    assert engine.requests_in_flight() == 0


def test_the_engine_takes_its_devices_from_the_environment(launched):
    engine = launched(devices=(device(4), device(6)), tp=2)
    engine.wait_ready(threading.Event())
    port = engine._address[1]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/sim/state", timeout=20) as answer:
        state = json.load(answer)
    assert (state["visible_devices"], state["tp"]) == ("4,6", 2)
    assert state["profile"]["kv_tokens"] == 800_000


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"devices": (device(0, "nonesuch"),)}, "the simulated accelerator cannot be had: no profile 'nonesuch'"),
        ({"max_model_len": 500_000}, "one request of 500000 tokens does not fit the KV cache of 400000 tokens"),
        ({"extra_args": ("--speed", "0")}, "the engine refuses the value of --speed: must be above 0, not 0"),
        ({"extra_args": ("--faults", "explode")}, "the faults to simulate cannot be read: 'explode' is not a fault"),
    ],
)
def test_an_engine_that_cannot_start_gives_its_cause(launched, more, said):
    engine = launched(**more)
    engine.wait()
    assert engine.failure().report.message.startswith(said)


def test_a_port_that_is_taken_is_named_as_the_cause(launched):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        engine = launched(extra_args=("--port", str(taken.getsockname()[1])))
        engine.wait()
    assert engine.failure().report.message == "the engine's port belongs to another process"


def test_flags_of_vllm_that_mean_nothing_here_are_named_in_the_log(tmp_path):
    argv = [*BACKEND.engine(spec()).argv, "--gpu-memory-utilization", "0.9", "--headless"]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        lines = [process.stderr.readline() for _ in range(3)]
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert lines[2].rstrip().endswith("without effect in a simulated engine: --gpu-memory-utilization 0.9")


def test_root_causes_are_not_seen_in_a_log_of_an_engine_that_works():
    lines = ["INFO 12-01 00:00:00 [hetero_llm_sim] simulated fast, tp=1, pp=1, speed 1"]
    assert find_root_cause(lines, BACKEND.engine(spec()).root_causes) is None
