import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from hetero_llm.cluster import state
from hetero_llm.errors import FolderUnusable


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


def test_a_name_is_claimed_once_while_its_owner_lives():
    assert state.claim_record(state.new_record("lab", started_unix_s=1.0, role="lab"))
    assert not state.claim_record(state.new_record("lab", started_unix_s=2.0, role="lab"))
    assert state.read_record("lab").started_unix_s == 1.0


def test_the_name_of_a_dead_process_can_be_claimed_and_its_files_are_removed(tmp_path):
    left = tmp_path / f"{state.RAY_DIR_PREFIX}x"
    left.mkdir()
    mine = state.new_record("lab", started_unix_s=2.0, role="lab")
    state.write_record(replace(mine, pid_created_unix_s=mine.pid_created_unix_s - 3600, temp_dir=str(left)))
    assert state.claim_record(mine)
    assert state.read_record("lab") == mine
    assert not left.exists()


def test_a_lab_and_nodes_are_no_serve():
    for name, role in (("lab", "lab"), ("node-a", "node"), ("m", "serve")):
        state.write_record(state.new_record(name, started_unix_s=1.0, role=role))
    assert [record.name for record in state.live_records()] == ["m"]
    assert {record.name for record in state.all_live_records()} == {"lab", "node-a", "m"}


def test_a_serve_on_a_lab_is_no_second_cluster_and_the_token_is_found():
    lab = replace(state.new_record("lab", started_unix_s=2.0, role="lab"), address="127.0.0.1:1", temp_dir="/tmp/x")
    state.write_record(replace(state.new_record("m", started_unix_s=1.0), address="127.0.0.1:1"))
    state.write_record(lab)
    assert state.running_clusters() == {"127.0.0.1:1": lab}
    assert state.token_path(lab) == "/tmp/x/token"


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": 1}'])
def test_what_is_no_record_is_removed_and_stops_nobody(tmp_path, content):
    mine = state.new_record("one", started_unix_s=1.0)
    state.write_record(mine)
    (tmp_path / "state" / "serve" / "lab.json").write_bytes(content)
    assert state.live_records() == (mine,)
    assert state.claim_record(state.new_record("lab", started_unix_s=1.0, role="lab"))


def test_a_state_folder_that_cannot_be_made_is_told_with_the_variable_that_names_another(tmp_path):
    (tmp_path / "state").touch()
    assert state.all_live_records() == ()
    for step in (state.state_dir, state.logs_dir):
        with pytest.raises(FolderUnusable) as caught:
            step()
        assert "HETERO_LLM_STATE_DIR" in caught.value.report.next[0]
    with pytest.raises(FolderUnusable):
        state.write_record(state.new_record("one", started_unix_s=1.0))


def test_a_record_with_a_name_no_file_can_have_is_told():
    with pytest.raises(FolderUnusable, match="cannot use"):
        state.claim_record(state.new_record("x" * 300, started_unix_s=1.0))


def test_writing_records_leaves_no_drafts(tmp_path):
    assert state.claim_record(state.new_record("lab", started_unix_s=1.0, role="lab"))
    assert not state.claim_record(state.new_record("lab", started_unix_s=1.0, role="lab"))
    state.write_record(state.new_record("one", started_unix_s=1.0))
    assert {path.name for path in (tmp_path / "state" / "serve").iterdir()} == {"lab.json", "one.json"}


def test_removing_a_record_twice_is_fine():
    state.write_record(state.new_record("one", started_unix_s=1.0))
    state.remove_record("one")
    state.remove_record("one")
    assert state.live_records() == ()
