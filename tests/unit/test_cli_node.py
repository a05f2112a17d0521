"""What the node and lab verbs answer before anything is started."""

import json
import os
import shlex
import socket
import tempfile
import time

import pytest
from ray._private.label_utils import validate_label_key, validate_label_value

from hetero_llm.cli import options
from hetero_llm.cluster import state


@pytest.fixture
def no_token(cli_env, monkeypatch):
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")


@pytest.fixture
def toy(monkeypatch):
    """Pretended devices of a kind that has no plugin."""
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "count=2,type=T1,memory=1GiB")
    monkeypatch.setenv("HETERO_LLM_NODE_NAME", "box")


def keep(name, **changes):
    """Leave the record a running command would."""
    record = state.new_record(name, started_unix_s=time.time(), role=changes.pop("role", "serve"))
    state.write_record(record)
    return state.update_record(record, **changes)


def test_start_without_head_says_what_there_is_instead(cli):
    outcome = cli("node", "start")
    assert outcome.code == 2
    assert "hetero-llm node join HOST:6379" in outcome.err


def test_joining_without_a_token_says_where_it_comes_from(cli, no_token):
    outcome = cli("node", "join", "127.0.0.1:6379")
    assert outcome.code == 2
    assert "the token of the cluster at 127.0.0.1:6379 is needed" in outcome.err
    assert "--token-file FILE" in outcome.err


def test_joining_where_nobody_listens_ends_at_once(cli, no_token, tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        outcome = cli("node", "join", f"127.0.0.1:{probe.getsockname()[1]}", "--token-file", token)
    assert outcome.code == 1
    assert "HL401" in outcome.err


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "..:6379", f"{'x' * 70}:6379", "[::1]:1"])
def test_an_address_nobody_can_have_is_answered_like_one_where_nobody_is(cli, no_token, tmp_path, address):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    outcome = cli("node", "join", address, "--token-file", token, "-o", "json")
    assert outcome.code == 2 or "HL401" in outcome.err
    assert "HL9" not in outcome.err + outcome.out


def test_a_port_alone_is_no_address(cli, no_token, tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    assert "'6379' is not HOST:PORT" in cli("node", "join", "6379", "--token-file", token).err


@pytest.mark.parametrize("address", ["", "head", "6379"])
def test_a_wrong_address_is_told_before_a_token_is_asked_for(cli, no_token, address):
    assert "is not HOST:PORT" in cli("node", "join", address).err


@pytest.mark.parametrize("words", [("start", "--head", "--port", 0), ("join", "127.0.0.1:6379")])
def test_a_token_file_that_is_empty_or_missing_is_told_before_anything_starts(cli, no_token, monkeypatch, words):
    empty = state.state_dir() / "empty"
    empty.touch()
    outcome = cli("node", *words, "--token-file", empty)
    assert (outcome.code, "is empty" in outcome.err) == (2, True)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nonexistent/token")
    outcome = cli("node", *words)
    assert (outcome.code, "cannot read the token in /nonexistent/token" in outcome.err) == (2, True)


def test_a_token_file_is_known_by_its_whole_path_for_commands_in_other_folders(cli, cli_env, no_token, monkeypatch):
    (cli_env / "token").touch()
    monkeypatch.chdir(cli_env)
    outcome = cli("node", "join", "127.0.0.1:6379", "--token-file", "token")
    assert f"the token file {cli_env / 'token'} is empty" in outcome.err


def test_folders_that_cannot_be_made_are_no_bug(cli, cli_env, no_token, monkeypatch):
    (cli_env / "file").touch()
    monkeypatch.setenv("HETERO_LLM_LEASE_DIR", str(cli_env / "file"))
    assert "HL106" in cli("devices").err
    monkeypatch.setenv("HETERO_LLM_STATE_DIR", str(cli_env / "file"))
    assert "HL403" in cli("node", "leave").err
    outcome = cli("node", "start", "--head", "--port", 0)
    assert (outcome.code, "HL106" in outcome.err) == (1, True)
    assert "HETERO_LLM_STATE_DIR" in outcome.err


def test_joining_needs_a_port(cli, no_token, tmp_path):
    token = tmp_path / "token"
    token.write_text("0" * 64)
    outcome = cli("node", "join", "head", "--token-file", token)
    assert "'head' is not HOST:PORT" in outcome.err


@pytest.mark.parametrize("words", [("node", "start", "--head"), ("serve",), ("plan",)])
@pytest.mark.parametrize("label", ["rack", "rack=", "=7", "a b=c", "zone = a", "-a=b", "a=b-", "a/b/c=d", "a=b=c"])
def test_a_label_that_ray_would_not_take_is_refused_wherever_one_is_given(cli, words, label):
    outcome = cli(*words, "--label", label)
    assert outcome.code == 2
    assert "is not KEY=VALUE" in outcome.err


def test_labels_that_ray_takes_are_taken():
    for key, value in (("rack", "7"), ("example.org/rack_no", "b.7"), ("a" * 63, "b" * 63)):
        assert options.label(f"{key}={value}") == (key, value)
        assert (validate_label_key(key), validate_label_value(value)) == (None, None)


@pytest.mark.parametrize("label", ["hetero-llm.io/kind=cuda", "ray.io/node-id=1"])
def test_a_node_cannot_be_given_the_labels_that_tell_what_it_is(cli, label):
    outcome = cli("node", "start", "--head", "--label", label)
    assert (outcome.code, "is given by the cluster itself" in outcome.err) == (2, True)


def test_an_address_of_another_machine_is_refused_before_anything_is_started(cli, cli_env, no_token, toy, monkeypatch):
    (cli_env / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(cli_env / "tmp"))
    words = ("--kind", "toynpu", "--address-of-this-node", "192.0.2.1")
    outcome = cli("node", "start", "--head", "--port", 0, *words)
    assert outcome.code == 1
    assert "192.0.2.1 is no address of this machine" in outcome.err
    assert list((cli_env / "tmp").iterdir()) == []


def test_a_kind_this_machine_has_none_of_is_refused(cli, no_token):
    outcome = cli("node", "start", "--head", "--kind", "toynpu", "--port", 0)
    assert outcome.code == 2
    assert "no toynpu device" in outcome.err


def test_leaving_without_being_in_a_cluster_is_told(cli):
    outcome = cli("node", "leave")
    assert (outcome.code, "HL403" in outcome.err) == (1, True)


def test_leaving_with_several_asks_which(cli):
    keep("node-a", role="node", nodes=("a-cuda", "a-ascend"))
    keep("node-b", role="node", nodes=("b",))
    outcome = cli("node", "leave")
    assert outcome.code == 2
    assert "hetero-llm node leave node-a   # a-cuda, a-ascend" in outcome.err


def test_leaving_does_not_touch_a_serve(cli):
    keep("m-1", models=("m",), address="127.0.0.1:1")
    assert cli("node", "leave").code == 1


def test_env_prints_what_ray_takes_from_its_environment(cli, toy):
    outcome = cli("node", "env", "--kind", "toynpu")
    assert outcome.code == 0
    lines = [shlex.split(text.removeprefix("export "))[0].partition("=") for text in outcome.out.splitlines()]
    values = {name: value for name, _, value in lines}
    assert json.loads(values["RAY_OVERRIDE_RESOURCES"]) == {
        "GPU": 0,
        "NPU": 0,
        "hetero_toynpu": 2,
        "hetero_toynpu:T1": 2,
    }
    assert json.loads(values["RAY_OVERRIDE_LABELS"])["hetero-llm.io/kind"] == "toynpu"
    assert values["RAY_AUTH_MODE"] == "token"


def test_env_of_a_machine_with_two_kinds_asks_which(cli, toy):
    outcome = cli("node", "env")
    assert outcome.code == 2
    assert "hetero-llm node env --kind toynpu" in outcome.err


def test_env_as_json_has_the_same_variables(cli, toy):
    assert "RAY_OVERRIDE_RESOURCES" in cli("node", "env", "--kind", "toynpu", "-o", "json").data["env"]


def test_a_second_lab_is_refused_before_anything_starts(cli, cli_env):
    (cli_env / "lab.yaml").write_text("nodes: [{name: a, kind: cpu}]")
    keep("lab", role="lab")
    outcome = cli("lab", "up", cli_env / "lab.yaml")
    assert outcome.code == 1
    assert "HL410" in outcome.err
    assert f"process {os.getpid()}" in outcome.err


def test_no_lab_to_end_is_told(cli):
    outcome = cli("lab", "down")
    assert (outcome.code, "HL403" in outcome.err) == (1, True)


def test_a_lab_file_with_a_mistake_is_refused_before_anything_starts(cli, cli_env):
    (cli_env / "lab.yaml").write_text("nodes: [{name: a, knid: cpu}]")
    outcome = cli("lab", "up", cli_env / "lab.yaml")
    assert outcome.code == 2
    assert "did you mean 'kind'?" in outcome.err
    assert list(cli_env.rglob("*.json")) == []
