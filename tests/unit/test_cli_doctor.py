"""The doctor's own checks; those of a kind are its backend's."""

import pytest

from hetero_llm.cli import checks


def test_doctor_exits_with_1_and_says_what_to_do_when_a_check_fails(cli, cli_env, monkeypatch):
    (cli_env / "file").write_text("")
    monkeypatch.setenv("HETERO_LLM_STATE_DIR", str(cli_env / "file" / "state"))
    outcome = cli("doctor", "-o", "json")
    assert outcome.code == 1
    assert outcome.data["ok"] is False
    failed = next(check for check in outcome.data["checks"] if check["name"] == "state")
    assert failed["ok"] is False
    assert "HETERO_LLM_STATE_DIR" in failed["next"][0]


def test_doctor_of_one_kind_runs_only_its_checks(cli):
    names = {check["name"] for check in cli("doctor", "cpu", "-o", "json").data["checks"]}
    assert names
    assert all(name.startswith("cpu.") for name in names)


def test_doctor_of_an_unknown_kind_is_a_usage_error(cli):
    outcome = cli("doctor", "qpu", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL200")


@pytest.mark.parametrize(("version", "ok"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 13, 1), True)])
def test_python_must_be_new_enough(version, ok):
    assert checks.check_python(version).ok is ok


def test_the_installed_ray_is_the_one_asked_for():
    assert checks.check_ray().ok is True


def test_space_is_measured_where_the_folder_will_be(tmp_path):
    check = checks.check_space("cache", tmp_path / "not" / "there" / "yet", 1, "advice")
    assert (check.ok, check.next) == (True, ())


def test_too_little_space_fails_with_numbers_and_advice(tmp_path):
    check = checks.check_space("cache", tmp_path, 1 << 60, "use another disk")
    assert (check.ok, check.next) == (False, ("use another disk",))
    assert "MiB wanted" in check.text


@pytest.mark.parametrize(("folder", "ok"), [("/tmp", True), ("/scratch/" + "x" * 60, False)])
def test_a_temporary_folder_too_deep_for_sockets_is_found(folder, ok):
    assert checks.check_temp(folder).ok is ok
