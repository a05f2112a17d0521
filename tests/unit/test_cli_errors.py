"""How a command ends: exit codes, the error format, JSON, tracebacks."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetero_llm.cli import entry, render
from hetero_llm.cli.group import VERBS
from hetero_llm.errors import DiscoveryFailed, ErrorReport


def test_an_expected_failure_exits_with_1_and_says_what_why_and_what_next(cli):
    outcome = cli("plan", "smolm2")
    assert outcome.code == 1
    first, *rest = outcome.err.splitlines()
    assert first == "error[HL301]: unknown model 'smolm2'"
    assert rest[0].startswith("  cause: ")
    assert any(line.startswith("  next: ") for line in rest)
    assert outcome.out == ""


def test_an_error_is_json_on_stdout_when_json_was_asked_for(cli):
    outcome = cli("plan", "smolm2", "-o", "json")
    assert json.loads(outcome.out)["schema"] == 1
    assert set(outcome.error) == {"code", "message", "cause", "next", "log"}
    assert outcome.error["code"] == "HL301"
    assert outcome.err == ""


@pytest.mark.parametrize("spelling", [("-o", "json"), ("-ojson",), ("--output", "json"), ("--output=json",)])
def test_every_spelling_of_json_output_also_holds_for_usage_errors(cli, spelling):
    outcome = cli("devices", "--no-such-flag", *spelling)
    assert (outcome.code, outcome.error["code"]) == (2, "HL100")


def test_engine_flags_do_not_choose_the_output_format(cli):
    assert entry.wanted_format(["serve", "--", "-o", "json"]) is render.Format.TABLE


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("sevre",), "serve"),
        (("plan",), "MODEL"),
        (("plan", "m", "--tp", "0"), "whole number from 1, nor auto"),
        (("plan", "m", "--tp", "x"), "whole number from 1, nor auto"),
        (("plan", "m", "--kv-cache-bytes", "many"), "512MiB"),
        (("serve", "--port", "70000"), "65535"),
        (("devices", "-o", "xml"), "table"),
        (("config", "nonsense"), "nonsense"),
    ],
)
def test_a_usage_error_exits_with_2_and_names_the_help(cli, argv, text):
    outcome = cli(*argv)
    assert outcome.code == 2
    assert outcome.err.startswith("error[HL100]: ")
    assert text in outcome.err
    assert "--help" in outcome.err


def test_no_verb_shows_the_help_and_exits_with_2(cli):
    outcome = cli()
    assert outcome.code == 2
    assert outcome.err.startswith("Usage: hetero-llm")


@pytest.fixture
def broken_verb(monkeypatch):
    def explode(argv):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(entry, "_invoke", explode)


def test_a_bug_exits_with_3_and_keeps_the_traceback_in_the_state_folder(cli, cli_env, broken_verb):
    outcome = cli("devices", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (3, "HL901")
    log = Path(outcome.error["log"])
    assert log.is_relative_to(cli_env)
    assert "ZeroDivisionError: a bug" in log.read_text()
    assert "devices -o json" in log.read_text()


def test_debug_shows_the_traceback_of_a_bug(cli, broken_verb):
    assert "Traceback (most recent call last)" in cli("devices", "--debug").err


def test_without_debug_no_traceback_is_shown(cli, broken_verb):
    assert "Traceback" not in cli("devices").err


def test_a_bug_is_still_reported_when_the_state_folder_cannot_be_written(cli, cli_env, monkeypatch, broken_verb):
    (cli_env / "file").write_text("")
    monkeypatch.setenv("HETERO_LLM_STATE_DIR", str(cli_env / "file" / "state"))
    outcome = cli("devices", "-o", "json")
    assert (outcome.code, outcome.error["log"]) == (3, None)


def test_ctrl_c_exits_with_130_without_a_word(cli, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "_invoke", interrupted)
    outcome = cli("devices")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_ctrl_c_ends_a_watching_process_with_130(cli_env):
    command = [sys.executable, "-m", "hetero_llm.cli", "devices", "--watch", "-o", "plain"]
    env = {**os.environ, "HETERO_LLM_OVERRIDE_CUDA": "count=1,type=X,memory=1GiB"}

    def interruptible():
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=interruptible
    ) as process:
        assert process.stdout.readline().startswith("node\t")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().strip() == ""


def test_a_reader_that_leaves_early_is_no_error(cli_env):
    command = f"{sys.executable} -m hetero_llm.cli explain -o plain | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("code\t")


def test_a_log_is_named_last(capsys):
    render.error(ErrorReport("HL501", "it died", "out of memory", ("use less",), "/logs/x.log"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["error[HL501]: it died", "  cause: out of memory", "  next: use less", "  log: /logs/x.log"]


def test_square_brackets_in_a_message_are_text_not_markup(capsys):
    render.error(DiscoveryFailed("device [bold]0[/bold] said [Errno 5]").report)
    assert "[bold]0[/bold] said [Errno 5]" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_help_text_and_takes_debug(cli, verb):
    outcome = cli(verb, "--help")
    assert outcome.code == 0
    assert f"hetero-llm {verb}" in outcome.out
    if verb not in ("models", "plugins", "config", "node", "lab"):
        assert "--debug" in outcome.out
