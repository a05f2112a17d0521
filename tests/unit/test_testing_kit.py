"""The contract kit: what a plugin's test class may and may not do, which level runs, and its own helpers."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

import pytest

from hetero_llm.plugin import Device, EngineLaunch
from hetero_llm.testing import BackendContract, fake_distribution, samples
from hetero_llm.testing.base import HOOKS, SETTINGS, Contract
from hetero_llm.testing.contract import _names_of_the_kit
from hetero_llm.testing.level0_engine import value_of
from hetero_llm.testing.levels import level_of, selected_level
from hetero_llm.testing.loading import load
from hetero_llm.testing.real_engine import RunningEngine

TESTS = sorted(name for name in dir(BackendContract) if name.startswith("test_"))


def config(option=None):
    return SimpleNamespace(getoption=lambda name, default: option)


# -- the guard -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TESTS)
def test_overriding_a_contract_test_is_an_error_that_names_it(name):
    with pytest.raises(TypeError, match=rf"Easy overrides {name}: a test of the contract is not a plugin's to change"):
        type("Easy", (BackendContract,), {name: lambda self: None})


def test_setting_a_contract_test_to_none_is_overriding_it():
    with pytest.raises(TypeError, match="overrides test_importing_the_plugin_works"):

        class Easy(BackendContract):
            test_importing_the_plugin_works = None


@pytest.mark.parametrize("order", ["before", "after"])
def test_overriding_through_a_mixin_is_an_error_that_names_the_mixin(order):
    mixin = type("Mixin", (), {"test_importing_the_plugin_works": lambda self: None})
    bases = (mixin, BackendContract) if order == "before" else (BackendContract, mixin)
    with pytest.raises(TypeError, match="overrides test_importing_the_plugin_works through Mixin"):
        type("Easy", bases, {})


def test_overriding_in_a_class_further_down_is_an_error_too():
    honest = type("Honest", (BackendContract,), {"backend": "a:B"})
    with pytest.raises(TypeError, match="Easy overrides test_importing_the_plugin_works"):
        type("Easy", (honest,), {"test_importing_the_plugin_works": lambda self: None})


@pytest.mark.parametrize(
    "name", ["observed", "plugin", "need", "need_capability", "_only_the_levels_asked_for", "_setup"]
)
def test_the_kits_own_parts_cannot_be_replaced(name):
    with pytest.raises(TypeError, match=f"overrides {name}: a part of the contract"):
        type("Easy", (BackendContract,), {name: lambda self: None})


@pytest.mark.parametrize(
    "mark", [pytest.mark.skip(reason="later"), pytest.mark.skipif(True, reason="x"), pytest.mark.xfail]
)
def test_excusing_the_whole_class_is_an_error(mark):
    with pytest.raises(TypeError, match=f"Easy is marked {mark.name}"):
        type("Easy", (BackendContract,), {"pytestmark": [mark]})


def test_settings_hooks_and_tests_of_its_own_are_a_plugins_to_set():
    own = {name: object() for name in (*SETTINGS, *HOOKS, "test_something_of_our_own", "HELPER")}
    made = type("Fine", (BackendContract,), {**own, "pytestmark": pytest.mark.usefixtures("tmp_path")})
    assert made.engine_args is own["engine_args"]


def test_what_is_settable_is_what_the_base_class_declares():
    public = {name for name in vars(Contract) if not name.startswith("_")} | {"backend"}
    assert set(SETTINGS) | set(HOOKS) | {"plugin", "observed", "gives", "need", "need_capability"} == public
    assert not _names_of_the_kit() & {*SETTINGS, *HOOKS}


# -- levels ----------------------------------------------------------------------------------------------------------


def test_levels_0_and_1_run_by_default(monkeypatch):
    monkeypatch.delenv("HETERO_LLM_CONTRACT_LEVEL", raising=False)
    assert selected_level(config()) == 1


def test_the_option_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("HETERO_LLM_CONTRACT_LEVEL", "2")
    assert selected_level(config()) == 2
    assert selected_level(config(option=0)) == 0


@pytest.mark.parametrize("text", ["3", "-1", "high", "1.0"])
def test_a_level_that_is_none_is_refused(monkeypatch, text):
    monkeypatch.setenv("HETERO_LLM_CONTRACT_LEVEL", text)
    with pytest.raises(pytest.UsageError, match="levels 0, 1 and 2"):
        selected_level(config())


def test_tests_of_every_level_exist_and_those_without_a_mark_are_on_level_0():
    levels = [level_of(getattr(BackendContract, name)) for name in TESTS]
    assert set(levels) == {0, 1, 2}
    assert level_of(lambda: None) == 0


# -- helpers ---------------------------------------------------------------------------------------------------------


def test_a_fake_distribution_is_installed_only_inside_its_block():
    with fake_distribution("vllm-acme", "9.8.7"):
        assert version("vllm-acme") == "9.8.7"
    with pytest.raises(PackageNotFoundError):
        version("vllm-acme")


def test_a_fake_distribution_hides_the_version_that_is_installed():
    real = version("pytest")
    with fake_distribution("pytest", "0.0.1"):
        assert version("pytest") == "0.0.1"
    assert version("pytest") == real


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        (("x", "--port", "1"), "1"),
        (("x", "--port=1"), "1"),
        (("x", "--port", "1", "--port=2"), "2"),
        (("x", "--portal", "1"), None),
        (("x", "--port"), None),
    ],
)
def test_the_last_of_equal_flags_counts(argv, value):
    assert value_of("--port", argv) == value


def test_sample_devices_are_like_a_real_one_where_there_is_one():
    cores = Device(kind="cpu", accelerator="x86-avx2", uid="u", index=0, cores=(4, 5))
    assert [device.cores for device in samples.devices("cpu", 2, cores)] == [(0,), (1,)]
    assert [device.cores for device in samples.devices("cpu", 2)] == [(), ()]
    assert samples.devices("cpu", 1, cores)[0].accelerator == "x86-avx2"


@pytest.mark.parametrize(
    ("target", "reason"),
    [("hetero_llm.plugin", "does not name a class"), ("collections:OrderedDict", "not a hetero_llm.plugin.Backend")],
)
def test_what_is_no_backend_is_refused_in_words(target, reason):
    with pytest.raises(TypeError, match=reason):
        load(target)


def test_without_pytest_the_kit_says_how_to_get_it():
    code = "import sys; sys.modules['pytest'] = None; import hetero_llm.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: hetero_llm.testing needs pytest: pip install pytest"


def test_only_the_kit_needs_pytest():
    code = (
        "import sys; import hetero_llm.cli.entry, hetero_llm.cli.plugins, hetero_llm.cli.plugin_check,"
        "hetero_llm.plugin.manager; print('pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_an_engine_that_cannot_be_started_leaves_no_folder_behind(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    with pytest.raises(FileNotFoundError):
        RunningEngine(EngineLaunch(argv=(str(tmp_path / "none"),)), 1, tmp_path)
    assert list(scratch.iterdir()) == []
