"""The verbs that read: each as table, plain and JSON, against this machine or devices that are pretended."""

import os
import subprocess
import sys

import pytest

from hetero_llm.errors import all_codes

H100 = "count=2,type=H100-80GB,memory=80GiB"
READING = [("devices",), ("plugins", "list"), ("models", "list"), ("explain",), ("version",), ("config", "show")]


@pytest.fixture
def two_h100(cli_env, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_CUDA", H100)
    monkeypatch.setenv("HETERO_LLM_DISABLE_PLUGINS", "cpu")


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_json_is_one_line_with_schema_and_data_and_nothing_else_on_stdout(cli, argv):
    outcome = cli(*argv, "-o", "json")
    assert outcome.code == 0
    assert outcome.out.count("\n") == 1
    assert outcome.data


@pytest.mark.parametrize("argv", READING, ids=" ".join)
def test_plain_is_tab_separated_with_a_header(cli, argv):
    lines = cli(*argv, "-o", "plain").out.splitlines()
    assert len({line.count("\t") for line in lines}) == 1
    assert lines[0] == lines[0].lower()


def test_devices_shows_what_was_not_measured_as_a_dash_and_null(cli, two_h100):
    rows = [line.split("\t") for line in cli("devices", "-o", "plain").out.splitlines()]
    assert [row[rows[0].index("numa")] for row in rows[1:]] == ["-", "-"]
    assert [device["numa"] for device in cli("devices", "-o", "json").data["nodes"][0]["devices"]] == [None, None]


def test_devices_says_that_pretended_devices_are_simulated(cli, two_h100):
    assert "H100-80GB (simulated)" in cli("devices").out


def test_devices_of_an_unreadable_override_is_a_usage_error(cli, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_CUDA", "count=many")
    outcome = cli("devices", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL204")


def test_a_plan_that_fits_exits_with_0(cli, two_h100):
    outcome = cli("plan", "smollm2-135m", "-o", "json")
    assert outcome.code == 0
    assert outcome.data["feasible"] is True
    assert outcome.data["replicas"][0]["accelerator"] == "H100-80GB"


def test_a_plan_that_does_not_fit_exits_with_1_and_still_prints_its_json(cli, two_h100):
    outcome = cli("plan", "smollm2-135m", "--replicas", 3, "-o", "json")
    assert outcome.code == 1
    assert outcome.data["feasible"] is False
    assert outcome.data["rejections"][0]["rule"] == "count"


def test_a_plan_that_does_not_fit_names_the_nearest_miss_and_what_would_fit(cli, two_h100):
    outcome = cli("plan", "smollm2-135m", "--replicas", 3)
    assert "error[HL305]: smollm2-135m does not fit: 3 x tp=1" in outcome.err
    assert "cause: " in outcome.err
    assert "--replicas 2 would fit" in outcome.err
    assert "count" in outcome.out


def test_words_for_the_engine_that_decide_what_fits_count_in_a_plan(cli, two_h100, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_ASCEND", "count=1,type=310P3,memory=24GiB")
    words = ("plan", "smollm2-135m", "--kind", "ascend")
    refused = cli(*words)
    assert (refused.code, "-- --dtype float16 converts it" in refused.out) == (1, True)
    assert cli(*words, "--", "--dtype", "float16").code == 0


def test_a_plan_is_made_from_the_inventory_of_another_machine(cli, cli_env, two_h100, monkeypatch):
    (cli_env / "inventory.json").write_text(cli("devices", "-o", "json").out)
    monkeypatch.delenv("HETERO_LLM_OVERRIDE_CUDA")
    outcome = cli("plan", "smollm2-135m", "--inventory", cli_env / "inventory.json", "-o", "json")
    assert (outcome.code, outcome.data["replicas"][0]["kind"]) == (0, "cuda")


def test_a_plan_imports_neither_ray_nor_an_engine(cli_process, two_h100):
    outcome = cli_process("plan", "smollm2-135m", env=None)
    assert outcome.code == 0
    script = (
        "import sys; from hetero_llm.cli.entry import run; code = run(['plan', 'smollm2-135m']);"
        "print(code, sorted({'ray', 'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_serve_dry_run_prints_the_plan_and_starts_nothing(cli, two_h100):
    outcome = cli("serve", "smollm2-135m", "--dry-run", "-o", "json")
    assert (outcome.code, outcome.data["feasible"]) == (0, True)


def test_cpu_is_not_chosen_silently(cli):
    outcome = cli("plan", "smollm2-135m", "-o", "json")
    assert outcome.code == 1
    assert outcome.data["rejections"][0]["rule"] == "kind"


def test_the_pools_of_a_file_get_different_devices(cli, cli_env, two_h100):
    pool = "{kind: cuda, tp: 1}"
    (cli_env / "c.yaml").write_text(f"models: [{{name: a, source: smollm2-135m, pools: [{pool}, {pool}]}}]")
    replicas = cli("plan", "a", "-f", cli_env / "c.yaml", "-o", "json").data["replicas"]
    assert [replica["id"] for replica in replicas] == ["a-cuda-1", "a-cuda-2"]
    assert replicas[0]["placement"] != replicas[1]["placement"]


def test_plugins_list_says_why_one_is_not_loaded(cli, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_DISABLE_PLUGINS", "cpu")
    records = cli("plugins", "list", "-o", "json").data["plugins"]
    record = next(record for record in records if record["name"] == "cpu")
    assert record["status"] == "disabled"
    assert "HETERO_LLM_DISABLE_PLUGINS" in record["reason"]


def test_models_show_knows_the_bundled_model_before_it_is_converted(cli):
    data = cli("models", "show", "smollm2-135m", "-o", "json").data
    assert (data["facts"]["layers"], data["path"]) == (30, None)


def test_models_rm_of_nothing_is_fine(cli):
    outcome = cli("models", "rm", "smollm2-135m")
    assert (outcome.code, outcome.out) == (0, "")
    assert "nothing was cached" in outcome.err


def test_models_rm_of_a_folder_is_refused(cli, cli_env):
    outcome = cli("models", "rm", cli_env)
    assert outcome.code == 1
    assert "belong to you" in outcome.err


def test_explain_lists_every_code(cli):
    assert [item["code"] for item in cli("explain", "-o", "json").data] == list(all_codes())


@pytest.mark.parametrize("word", ["HL305", "hl305", "305"])
def test_explain_tells_the_meaning_and_the_exit_code_of_one(cli, word):
    data = cli("explain", word, "-o", "json").data
    assert (data["name"], data["exit_code"]) == ("PlanInfeasible", 1)
    assert "No placement fits" in data["text"]


def test_explain_of_an_unknown_code_suggests_near_ones(cli):
    outcome = cli("explain", "HL395")
    assert outcome.code == 2
    assert "hetero-llm explain HL305" in outcome.err


def test_version_knows_ray_and_the_engine_without_importing_them(cli):
    data = cli("version", "-o", "json").data
    assert data["ray"].startswith("2.60")
    assert data["hetero-llm"]


def test_config_show_tells_origins(cli, cli_env, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_GATEWAY__PORT", "8123")
    data = cli("config", "show", "--origin", "-o", "json").data
    assert data["config"]["gateway"]["port"] == 8123
    assert data["origins"]["gateway.port"] == "env HETERO_LLM_GATEWAY__PORT"


def test_config_check_points_at_the_mistake(cli, cli_env):
    (cli_env / "c.yaml").write_text("gateway: {prot: 1}")
    outcome = cli("config", "check", "-f", cli_env / "c.yaml", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL102")
    assert outcome.error["message"].endswith("c.yaml:1:11: unknown key 'prot'; did you mean 'port'?")


def test_config_check_says_what_this_version_does_not_act_on(cli, cli_env):
    (cli_env / "c.yaml").write_text("models: [{name: a, idle_timeout_s: 5}]")
    outcome = cli("config", "check", "-f", cli_env / "c.yaml", "-o", "json")
    assert outcome.data["notes"] == ["models.a.idle_timeout_s is set, but this version does not act on it"]


def test_a_configuration_file_is_also_found_by_variable(cli, cli_env, monkeypatch):
    (cli_env / "c.yaml").write_text("gateway: {port: 8124}")
    monkeypatch.setenv("HETERO_LLM_CONFIG", str(cli_env / "c.yaml"))
    assert cli("config", "show", "-o", "json").data["config"]["gateway"]["port"] == 8124


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(cli, shell):
    assert "_HETERO_LLM_COMPLETE" in cli("completion", shell).out


def test_completion_completes_verbs_and_flags(cli_process):
    def complete(words: str, position: int) -> str:
        env = {"COMP_WORDS": words, "COMP_CWORD": str(position), "_HETERO_LLM_COMPLETE": "bash_complete"}
        return cli_process(env={**os.environ, **env}).out

    assert "plain,plan" in complete("hetero-llm pl", 1)
    assert "plain,--replicas" in complete("hetero-llm plan --re", 2)


@pytest.mark.parametrize(
    "argv", [("status",), ("stop",), ("stop", "--all"), ("logs", "x"), ("chat", "-m", "hi")], ids=" ".join
)
def test_verbs_that_need_a_deployment_say_when_there_is_none(cli, argv):
    outcome = cli(*argv)
    assert outcome.code == 1
    assert outcome.err.startswith("error[HL403]: ")
    assert "hetero-llm serve" in outcome.err


def test_stop_takes_a_model_or_all_not_both(cli):
    assert cli("stop", "m", "--all").code == 2
