"""What the planner predicts of the KV cache, against what real vLLM engines on this machine report."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from hetero_llm_cpu.plugin import CpuBackend

from hetero_llm.matrix import load_matrix
from hetero_llm.model import Device, NodeInventory, PoolWish, ReplicaPlan
from hetero_llm.models.facts import read_facts
from hetero_llm.plugin import EngineLaunch, EngineSpec
from hetero_llm.scheduler.planner import make_plan, rules_of

MAKER = Path(__file__).parents[1] / "support" / "tiny_models.py"
DEADLINE_S = 240.0
EXIT_DEADLINE_S = 60.0
BACKEND = CpuBackend()


def planned(model: Path, tp: int) -> tuple[ReplicaPlan, tuple[Device, ...]]:
    """Plan one replica on this machine's real devices, with an odd cache size that is no whole number of blocks."""
    devices = BACKEND.discover().devices
    node = NodeInventory(node="here", host="here", address="127.0.0.1", kind="cpu", devices=devices)
    wish = PoolWish(kinds=("cpu",), tp=tp, max_model_len=512, kv_cache_bytes=(1 << 27) + 12_345)
    facts = read_facts(model, "tiny", "tiny")
    plan = make_plan(facts, wish, [node], {"cpu": rules_of(BACKEND)}, load_matrix())
    assert plan.feasible, plan.rejections
    (replica,) = plan.replicas
    by_uid = {device.uid: device for device in devices}
    return replica, tuple(by_uid[uid] for uid in replica.placement[0].devices)


def launch_of(replica: ReplicaPlan, devices: tuple[Device, ...], model: Path) -> EngineLaunch:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    return BACKEND.engine(
        EngineSpec(
            model_path=str(model),
            served_name="tiny",
            devices=devices,
            tp=replica.tp,
            pp=replica.pp,
            host="127.0.0.1",
            port=port,
            max_model_len=replica.max_model_len,
            kv_cache_bytes=replica.memory.kv_bytes,
        )
    )


@contextmanager
def engine(launch: EngineLaunch, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {key: value for key, value in os.environ.items() if key not in launch.env_remove} | dict(launch.env)
    with log.open("wb") as output:
        process = subprocess.Popen(launch.argv, env=env, stdout=output, stderr=output, process_group=0)
    try:
        yield process
    finally:
        tree = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        segments = {path for one in tree for path in shared_memory_of(one)}
        process.terminate()
        try:
            process.wait(EXIT_DEADLINE_S)
        finally:
            for left in psutil.wait_procs(tree, timeout=EXIT_DEADLINE_S)[1]:
                left.kill()
            for segment in segments:
                segment.unlink(missing_ok=True)


def shared_memory_of(process: psutil.Process) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped; ranks of one node leave theirs behind."""
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}


def reported_kv_tokens(launch: EngineLaunch, log: Path, process: subprocess.Popen[bytes]) -> int:
    """Wait until the engine is up, so that it can be stopped in order; return the cache it reported."""
    (fact,) = [fact for fact in launch.facts if fact.name == "kv_tokens"]
    end = time.monotonic() + DEADLINE_S
    while "Application startup complete" not in (text := log.read_text()):
        assert process.poll() is None, text[-2000:]
        assert time.monotonic() < end, text[-2000:]
        time.sleep(0.2)
    match = fact.pattern.search(text)
    assert match is not None, text
    return int(match[1].replace(",", ""))


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("tiny-qwen2", 1), ("tiny-mqa", 2)])
def test_the_engine_reports_the_cache_that_was_predicted(name: str, tp: int, tmp_path: Path) -> None:
    model = tmp_path / name
    subprocess.run([sys.executable, str(MAKER), name, str(model)], check=True, timeout=120)
    replica, devices = planned(model, tp)
    launch, log = launch_of(replica, devices, model), tmp_path / "engine.log"
    with engine(launch, log) as process:
        reported = reported_kv_tokens(launch, log, process)
    assert replica.kv_tokens == pytest.approx(reported, rel=0.05)
