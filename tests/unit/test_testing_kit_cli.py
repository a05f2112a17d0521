"""`plugins check` and `plugins new` on the command line."""

import sys

import psutil
import pytest
from local_cluster import wait_for

from hetero_llm.cli.plugin_check import ContractTest, not_loaded
from hetero_llm.plugin.manager import PluginRecord


def test_checking_a_plugin_shows_each_promise_with_its_level(cli):
    found = cli("plugins", "check", "cpu", "-o", "json")
    assert found.code == 0, found.out
    assert (found.data["ok"], found.data["level"], found.data["plugin"]["kind"]) == (True, 0, "cpu")
    assert {test["level"] for test in found.data["tests"]} == {0}
    assert "importing the plugin loads no vendor library" in [test["test"] for test in found.data["tests"]]


def test_a_plugin_may_be_named_by_its_distribution_and_the_table_has_a_reason_for_what_is_skipped(cli):
    found = cli("plugins", "check", "hetero-llm-sim")
    assert found.code == 0, found.out
    assert "sim declares forms_groups = False" in found.out


def test_a_broken_promise_is_shown_with_the_reason_and_exit_code_1(cli, tmp_path):
    contract = tmp_path / "test_contract.py"
    contract.write_text(
        "from hetero_llm.testing import BackendContract\n"
        "class TestCpu(BackendContract):\n"
        "    backend = 'hetero_llm_cpu.plugin:CpuBackend'\n"
        "    def sample_devices(self, count):\n"
        "        return super().sample_devices(1) * count\n"
    )
    found = cli("plugins", "check", "cpu", "--contract", contract, "-o", "json")
    assert (found.code, found.data["ok"]) == (1, False)
    failed = {test["test"]: test["text"] for test in found.data["tests"] if test["outcome"] == "failed"}
    assert "two ranks share one" in failed["every device has variables of its own"]


def test_a_contract_file_that_overrides_a_test_is_told_so(cli, tmp_path):
    contract = tmp_path / "test_contract.py"
    contract.write_text(
        "from hetero_llm.testing import BackendContract\n"
        "class TestCpu(BackendContract):\n"
        "    backend = 'hetero_llm_cpu.plugin:CpuBackend'\n"
        "    def test_importing_the_plugin_works(self): pass\n"
    )
    found = cli("plugins", "check", "cpu", "--contract", contract, "-o", "json")
    assert found.code == 1
    assert "overrides test_importing_the_plugin_works" in found.data["tests"][0]["text"]


def test_a_contract_file_without_tests_is_an_error_with_what_pytest_said(cli, tmp_path):
    contract = tmp_path / "test_contract.py"
    contract.write_text("")
    found = cli("plugins", "check", "cpu", "--contract", contract, "-o", "json")
    assert (found.code, found.error["code"]) == (1, "HL213")
    assert "no tests ran" in found.error["cause"]


def test_a_process_that_a_plugin_leaves_running_is_ended_and_holds_nothing_up(cli, tmp_path):
    contract = tmp_path / "test_contract.py"
    contract.write_text(
        "import subprocess\n"
        "from pathlib import Path\n"
        "def test_it_starts_a_daemon():\n"
        "    daemon = subprocess.Popen(['sleep', '1000'])\n"
        "    Path(__file__).with_name('pid').write_text(str(daemon.pid))\n"
    )
    found = cli("plugins", "check", "cpu", "--contract", contract, "-o", "json")
    assert found.data["tests"][0]["test"] == "it starts a daemon"
    wait_for(lambda: not lives(int((tmp_path / "pid").read_text())), 30.0)


def lives(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_an_unknown_plugin_is_an_error_that_suggests_the_near_one(cli):
    found = cli("plugins", "check", "cpuu", "-o", "json")
    assert (found.code, found.error["code"]) == (2, "HL200")
    assert "did you mean 'cpu'?" in found.error["next"]


def test_a_plugin_that_is_not_loaded_fails_with_the_reason(cli, monkeypatch):
    monkeypatch.setenv("HETERO_LLM_DISABLE_PLUGINS", "sim")
    found = cli("plugins", "check", "sim", "-o", "json")
    assert found.code == 1
    assert [(test["outcome"], test["text"]) for test in found.data["tests"]] == [
        ("failed", "named in HETERO_LLM_DISABLE_PLUGINS")
    ]


def test_a_plugin_without_a_backend_has_nothing_to_check():
    assert not_loaded(PluginRecord(name="extras")) == ContractTest(
        test="the plugin is found by its entry point and loaded",
        level=0,
        outcome="failed",
        text="it provides no backend",
    )


def test_without_pytest_the_error_says_how_to_get_it(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytest", None)
    found = cli("plugins", "check", "cpu", "-o", "json")
    assert (found.code, found.error["code"]) == (1, "HL213")
    assert found.error["next"] == [f"{sys.executable} -m pip install pytest"]


# -- plugins new -----------------------------------------------------------------------------------------------------


def test_a_new_plugin_is_a_folder_of_its_own_and_the_next_steps_are_told(cli, tmp_path):
    made = cli("plugins", "new", "acme", "--dir", tmp_path)
    assert made.code == 0
    assert (tmp_path / "hetero-llm-acme" / "hetero_llm_acme" / "plugin.py").is_file()
    assert "next: pytest" in made.err


@pytest.mark.parametrize("name", ["Acme", "1acme", "acme-x", "acme_x", "", "class", "a" * 21, "../x", "ac me"])
def test_a_name_that_can_be_no_kind_is_refused(cli, tmp_path, name):
    made = cli("plugins", "new", name, "--dir", tmp_path, "-o", "json")
    assert (made.code, made.error["code"]) == (2, "HL211")
    assert not list(tmp_path.glob("hetero-llm-*"))


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend", "sim"])
def test_a_name_that_is_taken_is_refused_with_its_owner(cli, tmp_path, name):
    made = cli("plugins", "new", name, "--dir", tmp_path, "-o", "json")
    assert (made.code, made.error["code"]) == (2, "HL211")
    assert f"taken by the plugin {name} of hetero-llm" in made.error["message"]


def test_a_package_of_that_name_is_not_hidden_by_a_new_one(cli, tmp_path, monkeypatch):
    (tmp_path / "hetero_llm_acme").mkdir()
    (tmp_path / "hetero_llm_acme" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    made = cli("plugins", "new", "acme", "--dir", tmp_path, "-o", "json")
    assert made.error["code"] == "HL211"


def test_a_folder_that_is_there_is_left_as_it_is(cli, tmp_path):
    mine = tmp_path / "hetero-llm-acme"
    mine.mkdir()
    (mine / "notes").write_text("mine")
    made = cli("plugins", "new", "acme", "--dir", tmp_path, "-o", "json")
    assert (made.code, made.error["code"]) == (2, "HL212")
    assert [path.name for path in mine.iterdir()] == ["notes"]
