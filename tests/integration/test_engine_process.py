"""EngineProcess against a small engine program: readiness, root causes, environment, and an end without a trace."""

import json
import re
import socket
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from stub_backend import launch

from hetero_llm.cluster import engine_process
from hetero_llm.cluster.engine_process import EngineProcess
from hetero_llm.errors import EngineFailed, EngineNotReady


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def shared_memory():
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engines = []

    def begin(*flags, **changes):
        port = free_port()
        engine = EngineProcess(
            launch(port, *flags, **changes),
            replica="r1",
            address=("127.0.0.1", port),
            served_name="m",
            log_path=tmp_path / "logs" / "r1.log",
        )
        engine.port = port
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.stop()


@pytest.fixture
def impatient(monkeypatch):
    """A failing engine that lives on is judged at once."""
    monkeypatch.setattr(engine_process, "DEATH_GRACE_S", 0.3)
    monkeypatch.setattr(engine_process, "STOP_GRACE_S", 0.3)


def ready(engine):
    engine.wait_ready(threading.Event())
    return engine


# -- ready ------------------------------------------------------------------------------------------------------------


def test_an_engine_is_ready_after_it_generated_a_token(start):
    engine = ready(start())
    assert engine.phase == "ready"
    assert engine.facts == {"kv_tokens": 1024}


def test_an_engine_that_only_answers_its_health_route_is_not_ready(start, impatient):
    engine = start("--token-status", 500)
    with pytest.raises(EngineFailed, match=r"r1 started but cannot generate \(HTTP 500\)") as failed:
        ready(engine)
    assert "the engine is dead" in failed.value.report.cause


def test_the_phase_follows_the_log(start):
    engine = start("--hang", "start")
    wait_for(lambda: engine.phase == "loading weights")


@pytest.mark.parametrize(
    ("place", "phase"),
    [("start", "loading weights"), ("health", "loading weights"), ("token", "generating the first token")],
)
def test_a_deadline_names_the_phase_that_hangs(start, impatient, place, phase):
    engine = start("--hang", place, start_deadline_s=2.0)
    began = time.monotonic()
    with pytest.raises(EngineNotReady, match="generated no token within 2 s") as late:
        ready(engine)
    assert f"it was {phase}" in late.value.report.cause
    assert late.value.report.log == str(engine.log_path)
    assert time.monotonic() - began < 5.0


def test_a_start_that_is_no_longer_wanted_ends_at_once(start, impatient):
    stopping = threading.Event()
    engine = start("--hang", "start")
    threading.Timer(0.3, stopping.set).start()
    with pytest.raises(EngineNotReady, match="was stopped while it was"):
        engine.wait_ready(stopping)


def test_a_program_that_is_not_there_is_named_and_leaves_no_scratch_folder(start, tmp_path):
    with pytest.raises(EngineFailed, match="engine of r1 cannot be started: /no/such/program"):
        start(argv=("/no/such/program",))
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


# -- root causes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["start", "token"])
def test_the_message_is_the_root_cause_from_the_log(start, place):
    engine = start("--die", place, "--exit-code", 3, "--say", "ValueError: no kernel for head size 16")
    with pytest.raises(EngineFailed, match=r"^head size 16 is not one$") as failed:
        ready(engine)
    assert "exited with code 3" in failed.value.report.cause
    assert "hetero-llm logs r1" in failed.value.report.next


def test_without_a_known_cause_the_last_line_is_given(start):
    engine = start("--die", "start", "--say", "all went well so far")
    with pytest.raises(EngineFailed, match="engine of r1 exited with code 1 while loading weights") as failed:
        ready(engine)
    assert "Starting to load model" in failed.value.report.cause


def test_an_end_with_code_0_is_a_failure_too(start):
    with pytest.raises(EngineFailed, match="engine of r1 exited with code 0"):
        ready(start("--die", "start", "--exit-code", 0))


def test_an_end_with_code_0_after_ready_is_a_failure_too(start):
    engine = ready(start("--life-s", 0.8, "--exit-code", 0))
    engine.wait()
    assert re.search("engine of r1 exited with code 0 while ready", str(engine.failure()))


def test_a_signal_is_named(start):
    engine = ready(start())
    psutil.Process(engine.pid).kill()
    engine.wait()
    assert "was ended by signal 9" in str(engine.failure())


# -- environment ------------------------------------------------------------------------------------------------------


def test_the_engine_gets_its_own_variables_and_none_that_are_not_its_business(start, monkeypatch, tmp_path):
    foreign = ("RAY_ADDRESS", "RAY_AUTH_TOKEN_PATH", "OMP_NUM_THREADS", "HETERO_LLM_STATE_DIR", "OTHER_VISIBLE_DEVICES")
    for name in foreign:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT", "yes")
    dump = tmp_path / "env.json"
    engine = ready(start("--dump-env", dump, env={"OWN": "1"}, env_remove=("OTHER_VISIBLE_DEVICES",)))
    seen = json.loads(dump.read_text())
    assert seen.keys().isdisjoint(foreign)
    assert (seen["KEPT"], seen["OWN"], seen["TMPDIR"]) == ("yes", "1", engine.scratch)


def test_a_variable_the_backend_sets_wins_over_the_scrubbing(start, tmp_path):
    dump = tmp_path / "env.json"
    ready(start("--dump-env", dump, env={"OMP_NUM_THREADS": "7"}))
    assert json.loads(dump.read_text())["OMP_NUM_THREADS"] == "7"


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_requests_in_flight_are_counted_from_the_engines_metrics(start):
    engine = ready(start("--token-gap-s", 0.2))
    assert engine.requests_in_flight() == 0
    body = {"prompt": "x", "max_tokens": 4, "stream": True}
    with httpx.stream("POST", f"http://127.0.0.1:{engine.port}/v1/completions", json=body):
        assert engine.requests_in_flight() == 1
    wait_for(lambda: engine.requests_in_flight() == 0)


def test_an_engine_that_does_not_answer_has_an_unknown_number_of_requests(start, impatient):
    engine = start("--hang", "start")
    assert engine.requests_in_flight() is None


# -- the end ----------------------------------------------------------------------------------------------------------


def test_stop_leaves_no_process_no_scratch_and_no_shared_memory(start, monkeypatch):
    monkeypatch.setattr(engine_process, "STOP_GRACE_S", 0.5)
    engine = ready(start("--ignore-sigterm", "--grandchildren", 2, "--shared-memory"))
    tree = psutil.Process(engine.pid).children(recursive=True)
    named = set(re.findall(r"shared memory (\S+)", engine.log_path.read_text()))
    assert len(tree) >= 2
    assert named <= set(engine.shared_memory()) & shared_memory()
    engine.stop()
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert engine.exit_code() is not None
    assert not Path(engine.scratch).exists()
    assert not [name for name in shared_memory() if name in named or engine.shm_prefix in name]


def test_grandchildren_of_a_killed_engine_end_with_stop(start, monkeypatch):
    engine = ready(start("--grandchildren", 1, "--shared-memory"))
    tree = engine.processes()
    engine.shared_memory()
    psutil.Process(engine.pid).kill()
    engine.wait()
    engine.stop()
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not [name for name in shared_memory() if engine.shm_prefix in name]


def test_stop_is_safe_twice_and_keeps_the_log(start):
    engine = ready(start())
    engine.stop()
    engine.stop()
    assert "Starting to load model" in engine.log_path.read_text()


# -- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_is_begun_anew_when_it_is_full(start, monkeypatch):
    monkeypatch.setattr(engine_process, "LOG_BYTES_MAX", 100_000)
    engine = ready(start("--flood-lines", 250))
    old = engine.log_path.with_name("r1.log.1")
    assert 100_000 < old.stat().st_size < 110_000
    assert engine.log_path.stat().st_size < 110_000
    assert "KV cache size" in engine.log_path.read_text()


def test_a_cause_that_a_flood_of_lines_follows_is_still_found(start):
    engine = start(
        "--say", "ValueError: no kernel for head size 16", "--flood-lines", 3000, "--die", "start", "--exit-code", 1
    )
    with pytest.raises(EngineFailed, match=r"^head size 16 is not one$"):
        ready(engine)
