"""What `serve` refuses before anything is started, in the foreground and detached."""

import socket

import pytest


@pytest.fixture
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        yield other.getsockname()[1]


def leftovers(folder):
    return sorted(path.name for path in folder.rglob("*.json"))


def test_a_port_in_use_ends_it_at_once(cli, cli_env, taken_port):
    outcome = cli("serve", "--port", taken_port, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (1, "HL103")
    assert leftovers(cli_env) == []


def test_an_open_address_without_keys_is_refused(cli):
    outcome = cli("serve", "--host", "0.0.0.0", "--port", 0, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL104")


def test_a_missing_key_file_is_refused(cli, cli_env):
    outcome = cli("serve", "--api-keys", cli_env / "none.yaml", "--port", 0, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL105")


def test_a_configuration_with_a_typo_is_refused(cli, cli_env):
    (cli_env / "c.yaml").write_text("modles: []")
    outcome = cli("serve", "-f", cli_env / "c.yaml", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL102")


@pytest.mark.parametrize(
    ("argv", "code"), [(("no-such-model",), "HL301"), (("./no-such-folder",), "HL302"), (("--tp", 2), "HL305")]
)
def test_what_cannot_be_served_leaves_no_record_behind(cli_process, cli_env, argv, code):
    outcome = cli_process("serve", *argv, "--port", 0, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (1, code)
    assert leftovers(cli_env / "state") == []


def test_detached_it_fails_with_the_same_error(cli_process, cli_env):
    outcome = cli_process("serve", "--tp", 2, "--port", 0, "--detach", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (1, "HL305")
    assert outcome.error["log"].endswith(".log")
    assert leftovers(cli_env / "state") == []


def test_detached_it_checks_the_port_before_going_to_the_background(cli, cli_env, taken_port):
    outcome = cli("serve", "--detach", "--port", taken_port, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (1, "HL103")
    assert not list(cli_env.rglob("*.log"))


@pytest.mark.parametrize("number", ["nan", "-nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [("serve", "--start-timeout-s"), ("serve", "--gpu-memory-utilization"), ("chat", "--temperature")],
)
def test_what_is_no_finite_number_is_refused(cli, words, number):
    outcome = cli(*words, number)
    assert (outcome.code, words[1] in outcome.err) == (2, True)
