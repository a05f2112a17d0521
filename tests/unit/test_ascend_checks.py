"""The checks of an Ascend node: what is seen, both sides of a mismatch, and the way out."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ascend import FakeChip, Machine, build_dcmi
from hetero_llm_ascend import checks

from hetero_llm.plugin import Check

CARDS = tuple(FakeChip(card=n, logical=n, physical=n) for n in range(2))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_dcmi(tmp_path_factory.mktemp("dcmi"))
    if built is None:
        pytest.skip("there is no C compiler to build the fake driver library with")
    return built


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "machine")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    return made


def look_up(**found: str) -> Callable[[str], str | None]:
    return lambda name: found.get(name.replace("-", "_"))


def assert_failed(check: Check, *words: str) -> None:
    assert check.ok is False
    assert check.next
    for word in words:
        assert word in check.text


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_a_machine_without_npus_has_one_undecided_check(machine: Machine) -> None:
    (check,) = checks.doctor(machine.root, {})
    assert (check.name, check.ok) == ("ascend.devices", None)


def test_every_check_has_a_name_of_its_own_and_a_way_out_when_it_fails(machine: Machine) -> None:
    machine.nodes(0, 1)
    found = checks.doctor(machine.root, {"ASCEND_RT_VISIBLE_DEVICES": "6,4", "RANK_TABLE_FILE": "/x"})
    names = [check.name for check in found]
    assert len(set(names)) == len(names) == 13
    assert all(name.startswith("ascend.") for name in names)
    assert all(check.next for check in found if check.ok is False)


# -- driver and devices ------------------------------------------------------------------------------------------------


def test_the_drivers_version_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "usr/local/Ascend/driver"
    folder.mkdir(parents=True)
    (folder / "version.info").write_text("Version=25.5.1\n")
    check = checks.driver(tmp_path)
    assert (check.ok, check.text) == (True, "driver 25.5.1")


def test_a_missing_driver_fails_on_a_host_and_is_open_in_a_container(tmp_path: Path) -> None:
    assert_failed(checks.driver(tmp_path), "version.info")
    (tmp_path / ".dockerenv").touch()
    assert checks.driver(tmp_path).ok is None


def test_device_files_that_this_user_may_use_pass(machine: Machine) -> None:
    machine.nodes(0, 1)
    assert checks.device_nodes(machine.root).text == "2 devices, all usable by this user"


def test_a_missing_manager_file_is_named(machine: Machine) -> None:
    machine.nodes(0)
    (machine.root / "dev/hisi_hdc").unlink()
    assert_failed(checks.device_nodes(machine.root), "hisi_hdc")


def test_no_device_file_at_all_fails(machine: Machine) -> None:
    assert_failed(checks.device_nodes(machine.root), "davinciN")


def test_a_device_file_that_this_user_may_not_use_names_file_and_group(machine: Machine) -> None:
    machine.nodes(0, 1)
    check = checks.device_nodes(machine.root, lambda path: path.name != "davinci1")
    assert_failed(check, "/dev/davinci1", "HwHiAiUser")
    assert "HwHiAiUser" in check.next[0]


def test_equal_counts_of_library_tool_and_files_pass(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    machine.npu_smi({"info": "info_910B4_26.0.rc1.txt", "info -m": "info-m_910B2.txt"})
    machine.nodes(0, 1)
    check = checks.counts(machine.root)
    assert (check.ok, check.text) == (True, "libdcmi 2, npu-smi 2, /dev 2")


def test_counts_that_differ_are_all_named(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    machine.nodes(0)
    assert_failed(checks.counts(machine.root), "libdcmi 2", "/dev 1")


def test_a_library_that_fails_is_why_there_is_no_count(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "init -8005")
    machine.nodes(0, 1)
    assert_failed(checks.counts(machine.root), "the driver is not loaded", "/dev 2")


# -- CANN --------------------------------------------------------------------------------------------------------------


def test_a_toolkit_whose_environment_is_set_passes(tmp_path: Path) -> None:
    (tmp_path / "version.info").write_text("Version=9.0.1\n")
    check = checks.toolkit(tmp_path / "elsewhere", {"ASCEND_HOME_PATH": str(tmp_path)})
    assert check.ok
    assert "CANN 9.0.1" in check.text


def test_a_toolkit_whose_environment_is_not_set_says_what_to_source(tmp_path: Path) -> None:
    (tmp_path / "usr/local/Ascend/ascend-toolkit/latest").mkdir(parents=True)
    check = checks.toolkit(tmp_path, {})
    assert_failed(check, "ASCEND_HOME_PATH")
    assert all("set_env.sh" in step for step in check.next)


def test_no_toolkit_fails(tmp_path: Path) -> None:
    assert_failed(checks.toolkit(tmp_path, {}), "not installed")


def test_libraries_that_load_pass() -> None:
    assert checks.libraries(("libc.so.6",)).ok


def test_a_library_that_does_not_load_is_named_with_the_loaders_words() -> None:
    assert_failed(checks.libraries(("libc.so.6", "libhccl-none.so")), "libhccl-none.so", "cannot open shared object")


def test_a_library_that_kills_its_process_fails_only_the_check(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to build the fatal library with")
    code = "#include <stdlib.h>\n__attribute__((constructor)) static void die(void) { abort(); }\n"
    library = tmp_path / "libdie.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-x", "c", "-o", library, "-"], input=code.encode(), check=True, timeout=60
    )
    assert_failed(checks.libraries((str(library),)), "loading ended with status -6")


# -- versions ----------------------------------------------------------------------------------------------------------


def test_fitting_versions_pass() -> None:
    assert checks.plugin_version(look_up(vllm_ascend="0.23.0", vllm="0.23.0+empty")).ok
    assert checks.torch_version(look_up(torch_npu="2.10.0.post4", torch="2.10.0")).ok


def test_versions_that_do_not_fit_are_both_named() -> None:
    assert_failed(checks.plugin_version(look_up(vllm_ascend="0.23.0", vllm="0.24.1")), "0.23.0", "0.24.1")
    assert_failed(checks.torch_version(look_up(torch_npu="2.10.0", torch="2.13.0+cpu")), "2.10.0", "2.13.0+cpu")


def test_what_is_not_installed_is_named() -> None:
    assert_failed(checks.plugin_version(look_up(vllm="0.23.0")), "vllm-ascend is not installed", "0.23.0")
    assert_failed(checks.torch_version(look_up(torch="2.10.0")), "torch-npu is not installed")


def test_vllm_ascend_alone_is_the_right_platform_plugin() -> None:
    assert checks.platform_plugin(["vllm_ascend:register"]).ok


@pytest.mark.parametrize("names", [[], ["acme:register"], ["acme:register", "vllm_ascend:register"]])
def test_none_another_or_a_second_platform_plugin_fails(names: list[str]) -> None:
    assert_failed(checks.platform_plugin(names), *names)


# -- environment -------------------------------------------------------------------------------------------------------


def test_a_visible_devices_variable_is_checked_for_its_grammar() -> None:
    assert checks.visible_devices({}).ok
    assert checks.visible_devices({"ASCEND_RT_VISIBLE_DEVICES": "0,1"}).ok
    assert_failed(checks.visible_devices({"ASCEND_RT_VISIBLE_DEVICES": "6,4"}), "6,4", "not ascending")
    assert_failed(checks.visible_devices({"ASCEND_RT_VISIBLE_DEVICES": "0, 1"}), "0, 1")


def test_a_rank_table_left_over_fails() -> None:
    assert checks.rank_table({}).ok
    assert_failed(checks.rank_table({"RANK_TABLE_FILE": "/tmp/table.json"}), "/tmp/table.json")


def test_a_taken_port_of_the_first_window_is_named_and_left_open() -> None:
    assert checks.port_window(lambda _port: True).ok
    check = checks.port_window(lambda port: port != 60007)
    assert (check.ok, "60007" in check.text) == (None, True)
    assert any("ip_local_reserved_ports=60000-65119" in step for step in check.next)


def test_an_interface_address_must_be_this_machines() -> None:
    assert checks.interface({}).ok
    assert checks.interface({"HCCL_IF_IP": "127.0.0.1"}).text == "HCCL_IF_IP=127.0.0.1 is on lo"
    assert_failed(checks.interface({"HCCL_IF_IP": "192.0.2.9"}), "192.0.2.9")
