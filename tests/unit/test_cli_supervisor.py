"""What `serve` tells about replicas while it runs, and how a failed one becomes the error."""

import pytest

from hetero_llm.cli.requests import ModelRequest
from hetero_llm.cli.supervisor import deployment_of, failure_report, raise_failure, tell_changes
from hetero_llm.errors import EngineFailed, ErrorReport, GroupPreflightFailed
from hetero_llm.model import ModelFacts, Plan, PoolWish, ReplicaState, ReplicaStatus, RoutingTable, to_data

FACTS = ModelFacts(
    name="m", source="m", architecture="X", parameters=1, weights_bytes=1, layers=1, heads=1, kv_heads=1, head_dim=64,
    hidden_size=64, vocab_size=1, max_model_len=1, dtype="bfloat16",
)  # fmt: skip


def test_the_cluster_keeps_the_wishes_the_plan_was_made_from_so_that_the_next_plan_takes_as_much():
    request = ModelRequest(name=None, source="m", wishes=(PoolWish(tp=2),), engine_args=("--kv-cache-dtype", "fp8"))
    kept = deployment_of(request, Plan(model=FACTS, feasible=True), "/models/m")
    assert kept.wishes == (PoolWish(tp=2, kv_cache_dtype="fp8"),)
    assert kept.engine_args == request.engine_args


def replica(name="m-1", state=ReplicaState.READY, **fields):
    common = {"model": "m", "app": "a", "kind": "cpu", "accelerator": "x", "node": "n", "started_unix_s": 0.0}
    return ReplicaStatus(replica=name, state=state, **common, **fields)


def table(*replicas):
    return RoutingTable(version=1, replicas=replicas)


def told(before, now, capsys):
    tell_changes(before, now)
    return [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()]


def test_nothing_new_is_not_told(capsys):
    assert told(table(replica()), table(replica()), capsys) == []


def test_a_replica_that_vanished_was_lost(capsys):
    assert told(table(replica()), table(), capsys) == ["replica m-1 was lost"]


def test_a_replica_that_failed_was_lost_for_a_reason(capsys):
    failed = replica(state=ReplicaState.FAILED, error=to_data(ErrorReport("HL501", "out of memory")))
    assert told(table(replica()), table(failed), capsys) == ["replica m-1 was lost: out of memory"]


def test_the_replacement_is_told_when_it_is_ready(capsys):
    starting = replica("m-2", ReplicaState.STARTING)
    assert told(table(replica()), table(starting), capsys) == ["replica m-1 was lost"]
    assert told(table(starting), table(replica("m-2")), capsys) == ["replica m-2 is ready"]


def test_a_replica_that_was_never_ready_is_not_lost(capsys):
    assert told(table(replica(state=ReplicaState.STARTING)), table(), capsys) == []


def test_the_error_of_a_failed_replica_is_raised_as_its_own_type_with_its_log():
    error = to_data(ErrorReport("HL503", "rank 1 did not come"))
    with pytest.raises(GroupPreflightFailed, match="rank 1") as caught:
        raise_failure([replica(), replica("m-2", ReplicaState.FAILED, error=error, log="/x.log")])
    assert caught.value.report.log == "/x.log"


def test_a_failure_without_words_is_still_an_engine_failure():
    with pytest.raises(EngineFailed, match="m-1 failed without saying why"):
        raise_failure([replica(state=ReplicaState.FAILED)])


def test_an_error_that_names_its_log_keeps_it():
    error = to_data(ErrorReport("HL501", "x", log="/own.log"))
    assert failure_report(replica(state=ReplicaState.FAILED, error=error, log="/x.log")).log == "/own.log"


def test_healthy_replicas_raise_nothing():
    raise_failure([replica(), replica(state=ReplicaState.STARTING)])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("count=1,type=H100-80GB", "planned on, not served"),
        ("count=1,type=H100-80GB,engine=cpu", "the engine of cpu cannot stand in for the one of cuda"),
    ],
)
def test_pretended_devices_without_an_engine_that_stands_in_are_refused_before_anything_starts(
    cli_process, monkeypatch, override, said
):
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_CUDA", override)
    outcome = cli_process("serve", "--kind", "cuda", "--port", "0", "--address", "local")
    assert (outcome.code, said in outcome.err) == (2, True)
    assert "starting a local cluster" not in outcome.err
