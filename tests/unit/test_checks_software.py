"""What the doctor says of engines and their plugins; the installed distributions are the inputs."""

import pytest

from hetero_llm.cli.checks_software import (
    EnginePlugin,
    check_engine_lock,
    check_platform_plugins,
    check_plugin_filter,
    installed_plugins,
    release,
)

ASCEND = EnginePlugin(name="ascend", distribution="vllm-ascend", version="0.23.0")
ACME = EnginePlugin(name="acme", distribution="vllm-acme", version="1.0")
GENERAL = EnginePlugin(name="lora_resolver", distribution="vllm", version="0.23.0")


def test_no_platform_plugin_and_one_are_both_right():
    assert check_platform_plugins(()).ok is True
    assert check_platform_plugins((ASCEND,)).ok is True


def test_two_platform_plugins_in_one_environment_fail_by_name():
    check = check_platform_plugins((ACME, ASCEND))
    assert check.ok is False
    assert "acme (vllm-acme 1.0), ascend (vllm-ascend 0.23.0)" in check.text
    assert "pip uninstall vllm-ascend" in check.next


def test_two_entry_points_of_one_distribution_are_one_plugin():
    twin = EnginePlugin(name="ascend_extra", distribution="vllm-ascend", version="0.23.0")
    assert check_platform_plugins((ASCEND, twin)).ok is True


def test_the_entry_points_of_this_environment_are_read(tmp_path, monkeypatch):
    info = tmp_path / "vllm_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.platform_plugins]\nacme = acme:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert ACME in installed_plugins("vllm.platform_plugins")


@pytest.mark.parametrize(
    ("plugin", "vllm"),
    [("0.23.0", "0.23.0"), ("0.23.0.post1", "0.23.0"), ("0.23.0rc1", "0.23.0"), ("0.23.0", "0.23.0+empty")],
)
def test_x6_a_plugin_with_vllm_of_its_own_release_is_right(plugin, vllm):
    assert check_engine_lock({"vllm": vllm, "vllm-ascend": plugin}).ok is True


@pytest.mark.parametrize("vllm", ["0.23.1", "0.24.0", "0.2.3", None])
def test_x6_a_plugin_for_another_vllm_fails_with_both_versions(vllm):
    check = check_engine_lock({"vllm": vllm, "vllm-ascend": "0.23.0"})
    assert check.ok is False
    assert check.text == f"vllm-ascend 0.23.0 needs vllm 0.23.0 exactly, found {vllm or 'none'}"
    assert "pip install vllm==0.23.0" in check.next


def test_any_vllm_is_right_without_a_bound_plugin():
    assert check_engine_lock({"vllm": "0.33.0", "vllm-ascend": None}).ok is True


def test_p5_a_filter_without_the_platform_plugin_would_run_on_the_cpu_silently():
    check = check_plugin_filter("lora_resolver", (ASCEND,), (GENERAL,))
    assert check.ok is False
    assert "ascend (vllm-ascend 0.23.0)" in check.text
    assert "unset VLLM_PLUGINS" in check.next


def test_an_empty_filter_leaves_out_everything():
    assert check_plugin_filter("", (ASCEND,), ()).ok is False


def test_a_filter_without_a_general_plugin_is_a_note():
    check = check_plugin_filter("ascend", (ASCEND,), (GENERAL,))
    assert check.ok is None
    assert "VLLM_PLUGINS=ascend,lora_resolver" in check.next


@pytest.mark.parametrize("allowed", [None, "ascend,lora_resolver", " ascend , lora_resolver"])
def test_a_filter_that_names_all_plugins_is_right_and_so_is_none(allowed):
    assert check_plugin_filter(allowed, (ASCEND,), (GENERAL,)).ok is True


@pytest.mark.parametrize(
    ("version", "wanted"),
    [("0.23.0rc1", "0.23.0"), ("v0.23.0", "0.23.0"), ("2.13.0+cpu", "2.13.0"), ("25.5.1", "25.5.1"), ("odd", "odd")],
)
def test_the_release_of_a_version_is_its_numbers(version, wanted):
    assert release(version) == wanted
