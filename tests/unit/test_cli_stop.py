"""For which `serve` the command waits after it has stopped a model."""

import time
from dataclasses import replace

import pytest

from hetero_llm.cli import stop
from hetero_llm.cluster import state


@pytest.fixture
def record(cli_env, monkeypatch):
    """The record of a `serve` that lives and will not end."""
    monkeypatch.setattr(stop, "END_DEADLINE_S", 0.0)
    made = state.new_record("m", started_unix_s=time.time())
    state.write_record(made)
    return made


def test_a_serve_whose_cluster_is_not_up_yet_is_not_waited_for_whatever_other_cluster_there_is(record, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    stop._wait_for_ends([replace(record, models=("m",))])


def test_a_serve_that_had_no_model_yet_is_not_waited_for(record):
    stop._wait_for_ends([replace(record, address="127.0.0.1:1")])


def test_a_serve_whose_cluster_is_gone_is_waited_for(record):
    with pytest.raises(stop.ClusterUnreachable, match="has not ended"):
        stop._wait_for_ends([replace(record, address="127.0.0.1:1", models=("m",))])
