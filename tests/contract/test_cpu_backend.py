"""The CPU backend keeps what the plugin API promises, on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hetero_llm_cpu.plugin import CpuBackend

from hetero_llm.matrix import load_matrix
from hetero_llm.model import NodeInventory, PoolWish, ReplicaPlan
from hetero_llm.models.facts import read_facts
from hetero_llm.plugin import API_VERSION, Device, EngineLaunch, EngineSpec, GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.rootcause import find_root_cause
from hetero_llm.scheduler.planner import make_plan, rules_of

MAKER = Path(__file__).parents[1] / "support" / "tiny_models.py"
KV_BYTES = (1 << 27) + 12_345
"""No whole number of blocks."""
READY_DEADLINE_S = 240
EXIT_DEADLINE_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_code(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def devices() -> tuple[Device, ...]:
    return CpuBackend().discover().devices


def test_the_class_attributes_are_in_the_documented_shape() -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*", CpuBackend.kind)
    assert CpuBackend.api_version == API_VERSION
    assert CpuBackend.native_resource is None
    assert CpuBackend.visible_devices_env is None
    assert "CUDA_VISIBLE_DEVICES" in CpuBackend.other_visible_envs


def test_importing_the_plugin_loads_no_heavy_library() -> None:
    code = "import sys, hetero_llm_cpu.plugin; print(sorted({'torch', 'vllm', 'ray', 'numpy'} & set(sys.modules)))"
    assert run_code(code) == "[]"


def test_discovery_versions_and_doctor_load_no_heavy_library() -> None:
    code = (
        "import sys; from hetero_llm_cpu.plugin import CpuBackend; b = CpuBackend(); b.discover(); b.versions();"
        "b.doctor(); print(sorted({'torch', 'vllm', 'ray', 'numpy'} & set(sys.modules)))"
    )
    assert run_code(code) == "[]"


def test_the_entry_makes_vllm_see_its_cpu_build() -> None:
    code = "import hetero_llm_cpu.vllm_entry, importlib.metadata as m; print(m.version('vllm'), m.version('click'))"
    vllm, click = run_code(code).split()
    assert vllm == "0.32.0+cpu"
    assert "+cpu" not in click


def test_devices_are_numbered_from_zero_with_unique_uids(devices: tuple[Device, ...]) -> None:
    assert [device.index for device in devices] == list(range(len(devices)))
    assert len({device.uid for device in devices}) == len(devices)


def test_devices_hold_disjoint_cores_that_this_process_may_use(devices: tuple[Device, ...]) -> None:
    cores = [core for device in devices for core in device.cores]
    assert len(cores) == len(set(cores))
    assert set(cores) <= os.sched_getaffinity(0)


def test_names_are_fit_to_be_resources_and_labels(devices: tuple[Device, ...]) -> None:
    for device in devices:
        assert re.fullmatch(r"[A-Za-z0-9._-]{1,63}", device.accelerator)
        assert device.kind == "cpu"


def test_memory_of_all_devices_is_not_more_than_the_machines(devices: tuple[Device, ...]) -> None:
    assert 0 < sum(device.memory_bytes or 0 for device in devices) <= psutil.virtual_memory().total
    assert all((device.free_bytes or 0) <= (device.memory_bytes or 0) for device in devices)


def test_discovery_answers_the_same_twice(devices: tuple[Device, ...]) -> None:
    again = CpuBackend().discover().devices
    assert [(d.uid, d.index, d.cores, d.memory_bytes) for d in again] == [
        (d.uid, d.index, d.cores, d.memory_bytes) for d in devices
    ]


def test_usage_is_read_for_each_device_in_order(devices: tuple[Device, ...]) -> None:
    readings = CpuBackend().usage(devices)
    assert [reading.uid for reading in readings] == [device.uid for device in devices]


def test_versions_are_those_of_the_lock() -> None:
    versions = CpuBackend().versions()
    assert versions["vllm"] == "0.32.0"
    assert versions["torch"] == "2.13.0+cpu"


def test_the_accelerator_here_is_one_the_matrix_knows(devices: tuple[Device, ...]) -> None:
    assert load_matrix().find("cpu", devices[0].accelerator) is not None


# -- Process groups: real ranks over Gloo --------------------------------------------------------------------------


def two_ranks(port: int, deadline_s: float = 60.0) -> GroupSetup:
    ranks = tuple(
        RankSpec(
            rank=number,
            node="here",
            address="127.0.0.1",
            device=Device(kind="cpu", accelerator="x", uid=f"c{number}", index=number, cores=(number,)),
        )
        for number in range(2)
    )
    spec = GroupSpec(ranks=ranks, tp=2, pp=1, master_address="127.0.0.1", master_port=port, deadline_s=deadline_s)
    return CpuBackend().group(spec)


def start_rank(setup: GroupSetup, rank: int) -> subprocess.Popen[str]:
    assert setup.preflight_argv is not None
    env = {key: value for key, value in os.environ.items() if key not in setup.env_remove}
    env |= setup.rank_env[rank]
    return subprocess.Popen(setup.preflight_argv, env=env, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_ranks_meet_and_all_reduce_over_gloo() -> None:
    setup = two_ranks(free_port())
    ranks = [start_rank(setup, number) for number in range(2)]
    endings = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in endings] == [0, 0], endings


@pytest.mark.slow
def test_a_rank_left_alone_fails_at_its_deadline_with_one_line_of_cause() -> None:
    setup = two_ranks(free_port(), deadline_s=8)
    rank = start_rank(setup, 0)
    stderr = rank.communicate(timeout=60)[1]
    assert rank.returncode == 1
    last = json.loads(stderr.strip().splitlines()[-1])
    assert (last["preflight"], last["phase"], last["rank"], last["interfaces"]) == ("failed", "meeting", 0, ["lo"])
    assert last["cause"].endswith("rank 1 never came")


# -- Engines: real vLLM --------------------------------------------------------------------------------------------


class Engine:
    """A running engine of the backend, as the core starts it: own process group, pinned, log in a file."""

    def __init__(self, launch: EngineLaunch, port: int, folder: Path) -> None:
        self.launch, self.url, self.log = launch, f"http://127.0.0.1:{port}", folder / "engine.log"
        env = {key: value for key, value in os.environ.items() if key not in launch.env_remove} | dict(launch.env)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(launch.argv, env=env, stdout=log, stderr=log, process_group=0)
        os.sched_setaffinity(self.process.pid, launch.cores)

    def complete(self, prompt: str, max_tokens: int) -> str:
        """Return the greedy continuation, waiting for the server to come up."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        deadline = time.monotonic() + READY_DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=READY_DEADLINE_S) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
            except urllib.error.HTTPError:
                raise
            except OSError:
                assert self.process.poll() is None, self.log.read_text()[-2000:]
                assert time.monotonic() < deadline, self.log.read_text()[-2000:]
                time.sleep(0.3)

    def tree(self) -> list[psutil.Process]:
        return [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]

    def stop(self) -> None:
        segments = shared_memory_of(self.process.pid)
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(EXIT_DEADLINE_S)
        finally:
            for process in psutil.process_iter():
                if process.pid != self.process.pid and _group_of(process) == self.process.pid:
                    process.kill()
            for segment in segments:
                segment.unlink(missing_ok=True)


def shared_memory_of(pid: int) -> set[Path]:
    """Return the /dev/shm files that a process tree has mapped."""
    found: set[Path] = set()
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        found |= {Path(path) for path in re.findall(r"(/dev/shm/\S+)", maps)}
    return found


def _group_of(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def spec_of(model: Path, devices: tuple[Device, ...], port: int, *flags: str) -> EngineSpec:
    return EngineSpec(
        model_path=str(model),
        served_name="tiny",
        devices=devices,
        tp=len(devices),
        pp=1,
        host="127.0.0.1",
        port=port,
        max_model_len=512,
        kv_cache_bytes=KV_BYTES,
        extra_args=flags,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a single KV head, which each of two ranks has a copy of."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run([sys.executable, str(MAKER), "tiny-mqa", str(folder)], check=True, timeout=120)
    return folder


@pytest.fixture(scope="module")
def planned(tiny: Path, devices: tuple[Device, ...]) -> ReplicaPlan:
    node = NodeInventory(node="here", host="here", address="127.0.0.1", kind="cpu", devices=devices)
    wish = PoolWish(kinds=("cpu",), tp=min(2, len(devices)), max_model_len=512, kv_cache_bytes=KV_BYTES)
    facts = read_facts(tiny, "tiny", "tiny")
    plan = make_plan(facts, wish, [node], {"cpu": rules_of(CpuBackend())}, load_matrix())
    assert plan.feasible, plan.rejections
    return plan.replicas[0]


@pytest.fixture(scope="module")
def running(
    tiny: Path, devices: tuple[Device, ...], planned: ReplicaPlan, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    port = free_port()
    by_uid = {device.uid: device for device in devices}
    held = tuple(by_uid[uid] for uid in planned.placement[0].devices)
    launch = CpuBackend().engine(spec_of(tiny, held, port))
    engine = Engine(launch, port, tmp_path_factory.mktemp("engine"))
    try:
        engine.complete("hello", 1)
        yield engine
    finally:
        engine.stop()


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_this_backend_launches_generates_a_token(running: Engine) -> None:
    assert running.complete("hello", 4)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_stays_on_its_cores(running: Engine) -> None:
    held = set(running.launch.cores)
    assert all(set(process.cpu_affinity() or ()) <= held for process in running.tree())


@pytest.mark.vllm
@pytest.mark.slow
def test_the_log_shows_every_phase_in_order_and_the_kv_cache(running: Engine) -> None:
    log = running.log.read_text().splitlines()
    places = [next(i for i, line in enumerate(log) if m.pattern.search(line)) for m in running.launch.phases]
    assert places == sorted(places)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_reports_the_cache_that_was_planned(running: Engine, planned: ReplicaPlan) -> None:
    (fact,) = [fact for fact in running.launch.facts if fact.name == "kv_tokens"]
    (found,) = {match[1] for match in map(fact.pattern.search, running.log.read_text().splitlines()) if match}
    assert planned.kv_tokens == pytest.approx(int(found.replace(",", "")), rel=0.05)


@pytest.mark.vllm
@pytest.mark.slow
def test_the_engine_stays_in_the_process_group_it_was_started_in(running: Engine) -> None:
    assert {os.getpgid(process.pid) for process in running.tree()} == {running.process.pid}


@pytest.mark.vllm
@pytest.mark.slow
def test_a_bad_flag_ends_the_engine_with_a_cause(tiny: Path, devices: tuple[Device, ...], tmp_path: Path) -> None:
    launch = CpuBackend().engine(spec_of(tiny, devices[:1], free_port(), "--no-such-flag"))
    engine = Engine(launch, 0, tmp_path)
    assert engine.process.wait(READY_DEADLINE_S) != 0
    cause = find_root_cause(engine.log.read_text().splitlines(), launch.root_causes)
    assert cause is not None
    assert cause.message == "the engine does not know the flag --no-such-flag"
