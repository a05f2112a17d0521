"""A command that goes on in the background, when another one has its name."""

import time
from dataclasses import replace

import pytest

from hetero_llm.cli.detach import start_detached
from hetero_llm.cluster import state
from hetero_llm.errors import AlreadyRunning, EngineFailed


@pytest.fixture
def lab_file(cli_env, monkeypatch):
    """A lab that would start; temporary files in the test's own folder."""
    (cli_env / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(cli_env / "tmp"))
    path = cli_env / "lab.yaml"
    path.write_text("nodes: [{name: a, kind: toynpu, devices: 'count=1,type=T1,memory=1GiB'}]")
    return path


def test_one_that_comes_second_is_refused_and_the_first_keeps_its_record(lab_file, cli_env):
    first = state.new_record("lab", started_unix_s=time.time(), role="lab")
    state.write_record(replace(first, ready=True, address="127.0.0.1:1"))
    with pytest.raises(AlreadyRunning):
        start_detached(["lab", "up", str(lab_file)], "lab")
    assert state.read_record("lab").pid == first.pid
    assert list((cli_env / "tmp").iterdir()) == []


def test_one_that_fails_before_it_has_a_record_is_told_by_its_last_words(cli_env):
    with pytest.raises(EngineFailed, match="before it was ready"):
        start_detached(["lab", "up", str(cli_env / "none.yaml")], "lab")
    assert "No such file" in (cli_env / "state" / "logs" / "lab.log").read_text()
