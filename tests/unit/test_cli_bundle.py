"""``doctor --bundle``: what is in it, what must never be, and that it says what it left out."""

import json
import stat
import tarfile
import time

import pytest

from hetero_llm.cli.redaction import PROMPT_LEFT_OUT, REDACTED, Redactor, is_secret_name, known_secrets
from hetero_llm.cluster import state

HUB_TOKEN = "hf_" + "AbCdEf" * 5
API_KEY = "sk-team-a-0123456789"
RAY_TOKEN = "ab12" * 16
ODD_KEY = "correct horse battery"


@pytest.fixture
def bundle(cli, cli_env, monkeypatch):
    """Write a bundle on a machine full of secrets; return its files by name."""
    monkeypatch.setenv("HOME", str(cli_env))
    monkeypatch.setenv("HF_TOKEN", HUB_TOKEN)
    monkeypatch.setenv("VLLM_API_KEY", ODD_KEY)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("UNRELATED_DIARY", "dear diary")
    (cli_env / "token").write_text(RAY_TOKEN)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(cli_env / "token"))
    (cli_env / "keys.yaml").write_text(f"- {{name: team-a, key: {API_KEY}}}\n")
    (cli_env / "hetero-llm.yaml").write_text("gateway: {port: 8123, api_keys_file: keys.yaml}\n")
    logs = cli_env / "state" / "logs"
    logs.mkdir(parents=True)
    lines = [
        "engine started at 10.0.0.2 on host npu-b",
        f"download with {HUB_TOKEN} from https://user:hunter22@example.org/x",
        f"client said Authorization: Bearer {API_KEY}",
        f"argv: serve --api-key {ODD_KEY} --max-tokens 5",
        "Received request cmpl-1: prompt: 'my medical history', params: x",
        f"model folder {cli_env}/models/m",
    ]
    (logs / "engine.log").write_text("\n".join(lines) + "\n")

    def write(*argv):
        path = cli_env / "report.tar.gz"
        outcome = cli("doctor", "cpu", "--bundle", path, "-f", cli_env / "hetero-llm.yaml", "-o", "json", *argv)
        with tarfile.open(path) as archive:
            files = {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in archive.getmembers()}
        return outcome, path, files

    return write


def test_the_bundle_has_checks_versions_devices_environment_configuration_and_logs(bundle):
    outcome, path, files = bundle()
    assert set(files) == {
        "about.txt",
        "doctor.json",
        "versions.json",
        "inventory.json",
        "environment.json",
        "config.json",
        "logs/logs-engine.log",
    }
    assert json.loads(files["doctor.json"])["checks"] == outcome.data["checks"]
    assert json.loads(files["versions.json"])["ray"].startswith("2.")
    assert json.loads(files["inventory.json"])["nodes"][0]["kind"] == "cpu"
    assert json.loads(files["config.json"])["values"]["gateway"]["port"] == 8123
    assert "look through it before you send it" in outcome.err
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_file_of_the_bundle_has_a_secret_and_what_tells_nodes_apart_is_kept(bundle, cli_env):
    _, _, files = bundle()
    everything = "".join(files.values())
    secrets = (HUB_TOKEN, API_KEY, RAY_TOKEN, ODD_KEY, "hunter22", "medical history", "diary", str(cli_env))
    assert [secret for secret in secrets if secret in everything] == []
    assert "model folder ~/models/m" in files["logs/logs-engine.log"]
    assert "engine started at 10.0.0.2 on host npu-b" in files["logs/logs-engine.log"]
    assert json.loads(files["environment.json"])["NCCL_DEBUG"] == "INFO"
    assert "Left out or replaced" in files["about.txt"]
    assert "nothing that was looked for is missing" in files["about.txt"]


def test_a_bundle_without_a_configuration_and_logs_says_so(cli, cli_env):
    path = cli_env / "report.tar.gz"
    cli("doctor", "cpu", "--bundle", path)
    with tarfile.open(path) as archive:
        about = archive.extractfile("hetero-llm-bundle/about.txt").read().decode()
    assert "a configuration file: none was named" in about
    assert "logs: there are none" in about


def test_a_state_folder_that_cannot_be_used_does_not_keep_the_bundle_from_being_written(bundle, cli_env):
    (cli_env / "state" / "serve" / "m.json").mkdir(parents=True)
    (cli_env / "state" / "logs" / "gone.log").symlink_to("nowhere")
    _, _, files = bundle()
    assert "engine started" in files["logs/logs-engine.log"]
    assert "gone.log, which cannot be read" in files["about.txt"]


def test_only_the_end_of_a_long_log_is_taken_and_no_half_line(bundle, cli_env):
    log = cli_env / "state" / "logs" / "long.log"
    log.write_text("".join(f"line {number:06d} {'x' * 80}\n" for number in range(5000)))
    _, _, files = bundle()
    lines = files["logs/logs-long.log"].splitlines()
    assert lines[-1].startswith("line 004999")
    assert all(line.startswith("line ") for line in lines)
    assert len(lines) < 2500


def test_a_file_that_is_there_is_not_overwritten(cli, cli_env):
    path = cli_env / "report.tar.gz"
    path.write_text("precious")
    outcome = cli("doctor", "cpu", "--bundle", path, "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL100")
    assert path.read_text() == "precious"


def test_a_bundle_that_cannot_be_written_is_an_error(cli, cli_env):
    outcome = cli("doctor", "cpu", "--bundle", cli_env / "no" / "such" / "folder.tar.gz", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL100")


@pytest.mark.parametrize("name", ["HF_TOKEN", "api_key", "OPENAI_API_KEY", "password", "AWS_SECRET_ACCESS_KEY", "keys"])
def test_names_of_secrets_are_known(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["api_keys_file", "RAY_AUTH_TOKEN_PATH", "max_num_batched_tokens", "kv_tokens", "tokenizer", "monkey", ""]
)
def test_names_that_only_look_alike_are_not(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("line", "clean"),
    [
        (f"x {HUB_TOKEN} y", f"x hf_{REDACTED} y"),
        ("key sk-abcdefghijkl", f"key sk-{REDACTED}"),
        ("Bearer abc.def-ghi", f"Bearer {REDACTED}"),
        ("--api-key=abc --port 1", f"--api-key={REDACTED} --port 1"),
        ("--hf-token abc --port 1", f"--hf-token {REDACTED} --port 1"),
        ('{"api_key": "abc", "port": 1}', f'{{"api_key": "{REDACTED}", "port": 1}}'),
        ("password=abc;port=1", f"password={REDACTED};port=1"),
        ("http://me:abc@host/x", f"http://{REDACTED}@host/x"),
        (f"token {'0f' * 32}", f"token {REDACTED}"),
        ("--max-tokens 5 tokens: 7 max_tokens=9", "--max-tokens 5 tokens: 7 max_tokens=9"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_secrets_are_known_by_what_they_look_like(line, clean):
    assert Redactor().text(line) == clean


@pytest.mark.parametrize(
    "line", ["prompt: 'hi'", '{"messages": [{"role": "user"}]}', "content='hi'", 'text_input = "hi"']
)
def test_lines_with_what_users_wrote_are_left_out(line):
    assert Redactor().text(f"{line}\nafter\n") == f"{PROMPT_LEFT_OUT}\nafter\n"


def test_a_secret_inside_another_is_taken_out_with_it():
    assert Redactor(["abcd", "abcd-efgh"]).text("x abcd-efgh y") == f"x {REDACTED} y"


def test_data_is_cleaned_by_key_and_by_content_and_keeps_its_shape():
    data = {"api_key": "abc", "empty_token": "", "list": ["Bearer abcdef", 1, None], "deep": {"password": {"a": 1}}}
    assert Redactor().data(data) == {
        "api_key": REDACTED,
        "empty_token": "",
        "list": [f"Bearer {REDACTED}", 1, None],
        "deep": {"password": REDACTED},
    }


def test_the_token_of_the_hub_is_known_from_its_file(cli_env, monkeypatch):
    (cli_env / "token").write_text("unusual-token\n")
    assert "unusual-token" in known_secrets({"HF_HOME": str(cli_env)})


@pytest.mark.parametrize("role", ["serve", "lab", "node"])
def test_the_tokens_of_all_clusters_of_this_machine_are_known(cli_env, role):
    (cli_env / "ray").mkdir()
    (cli_env / "ray" / "token").write_text("token of its own\n")
    (cli_env / "handed-out").write_text("token from elsewhere\n")
    for name, place in (("a", {"temp_dir": str(cli_env / "ray")}), ("b", {"token": str(cli_env / "handed-out")})):
        record = state.new_record(name, started_unix_s=time.time(), role=role)
        state.write_record(record)
        state.update_record(record, **place)
    assert {"token of its own", "token from elsewhere"} <= set(known_secrets({}))
