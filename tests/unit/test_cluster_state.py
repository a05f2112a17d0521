import subprocess
import sys

import psutil
import pytest

from hetero_llm.cluster import state


@pytest.fixture(autouse=True)
def own_state_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_STATE_DIR", str(tmp_path / "state"))


def test_a_record_of_a_living_process_is_found():
    record = state.new_record("one", started_unix_s=1.0)
    state.write_record(record)
    assert state.live_records() == (record,)


def test_a_record_of_a_dead_process_is_removed_by_the_next_reader():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = psutil.Process(child.pid).create_time()
    state.write_record(state.ServeRecord(name="gone", pid=child.pid, pid_created_unix_s=created, started_unix_s=1.0))
    assert [record.name for record in state.live_records()] == ["gone"]
    child.communicate(b"\n")
    assert state.live_records() == ()
    assert state.read_record("gone") is None


def test_a_reused_process_id_does_not_count_as_alive():
    record = state.new_record("other", started_unix_s=1.0)
    imposter = state.ServeRecord(
        name="other", pid=record.pid, pid_created_unix_s=record.pid_created_unix_s - 3600, started_unix_s=1.0
    )
    assert not state.is_alive(imposter)


def test_an_update_is_read_back():
    record = state.new_record("one", started_unix_s=1.0)
    state.update_record(record, url="http://127.0.0.1:8000", ready=True, models=("m",))
    assert state.read_record("one").url == "http://127.0.0.1:8000"
    assert state.read_record("one").models == ("m",)


def test_removing_a_record_twice_is_fine():
    state.write_record(state.new_record("one", started_unix_s=1.0))
    state.remove_record("one")
    state.remove_record("one")
    assert state.live_records() == ()
