"""``hetero-llm doctor`` as a command, and its checks of the machine that belong to no kind."""

import os
import resource

import pytest

from hetero_llm.cli import checks

TOY = """
from hetero_llm.plugin import Backend, Check, Device, Discovery, Health, Problem, hookimpl

class Toy(Backend):
    kind = "toy"
    api_version = "1.0"
    visible_devices_env = "TOY_VISIBLE_DEVICES"
    def discover(self): return {discovery}
    def versions(self): return {{}}
    def device_env(self, devices): return {{}}
    def group(self, spec): raise NotImplementedError
    def engine(self, spec): raise NotImplementedError
    def check_model(self, facts, accelerator, wish): return ()
    def doctor(self): return (Check(name="toy.driver", ok=False, text="no driver"),)

@hookimpl
def hetero_llm_backends(): return (Toy(),)

@hookimpl
def hetero_llm_doctor_checks(): return (Check(name="house-rule", ok=True, text="kept"),)
"""
UNUSABLE = 'Discovery(problems=(Problem(kind="toy", code="HL203", text="/dev/toy0 is there, libtoy.so is not"),))'
ONE = 'Discovery(devices=(Device(kind="toy", accelerator="T9", uid="t", index=0, health=Health.OK),))'


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Install a vendor's plugin, as probes in their own process see it too."""

    def install(discovery):
        module = f"toy_doctor_{abs(hash(discovery))}"
        (tmp_path / f"{module}.py").write_text(TOY.format(discovery=discovery))
        info = tmp_path / "hetero_llm_toy-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetero-llm-toy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[hetero_llm.backends]\ntoy = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))

    return install


def by_name(outcome):
    return {check["name"]: check for check in outcome.data["checks"]}


def test_doctor_exits_with_1_and_says_what_to_do_when_a_check_fails(cli, cli_env, monkeypatch):
    (cli_env / "file").write_text("")
    monkeypatch.setenv("HETERO_LLM_STATE_DIR", str(cli_env / "file" / "state"))
    outcome = cli("doctor", "-o", "json")
    assert outcome.code == 1
    assert outcome.data["ok"] is False
    assert by_name(outcome)["state"]["ok"] is False
    assert "HETERO_LLM_STATE_DIR" in by_name(outcome)["state"]["next"][0]


def test_a_record_that_cannot_be_read_is_a_failed_check_and_no_end_of_the_doctor(cli, cli_env):
    (cli_env / "state" / "serve" / "m.json").mkdir(parents=True)
    outcome = cli("doctor", "-o", "json")
    assert (outcome.code, by_name(outcome)["state"]["ok"]) == (1, False)
    assert "m.json" in by_name(outcome)["state"]["text"]


def test_the_exit_code_is_that_of_the_checks(cli):
    outcome = cli("doctor", "cpu", "-o", "json")
    failed = any(check["ok"] is False for check in outcome.data["checks"])
    assert (outcome.code, outcome.data["ok"]) == (int(failed), not failed)


def test_doctor_of_one_kind_runs_only_its_checks(cli):
    names = set(by_name(cli("doctor", "cpu", "-o", "json")))
    assert {"cpu.discovery", "cpu.matrix", "cpu.cores"} < names
    assert all(name.startswith("cpu.") for name in names)


def test_doctor_of_an_unknown_kind_is_a_usage_error(cli):
    outcome = cli("doctor", "qpu", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL200")


def test_d7_hardware_that_is_there_but_unusable_exits_with_1_and_gives_the_reason(cli, toy):
    toy(UNUSABLE)
    outcome = cli("doctor", "-o", "json")
    check = by_name(outcome)["toy.discovery"]
    assert outcome.code == 1
    assert check["text"] == "present, unusable: /dev/toy0 is there, libtoy.so is not"
    assert "toy.driver" in by_name(outcome), "the backend's own checks say more"


def test_d9_an_absent_vendor_is_absent_and_nothing_else(cli, toy):
    toy("Discovery()")
    names = set(by_name(cli("doctor", "-o", "json")))
    assert not [name for name in names if name.startswith("toy.")]
    assert "house-rule" in names, "what the plugin checks for no kind in particular is run"


def test_an_absent_kind_that_is_named_is_checked_all_the_same(cli, toy):
    toy("Discovery()")
    found = by_name(cli("doctor", "toy", "-o", "json"))
    assert found["toy.discovery"]["ok"] is None
    assert found["toy.driver"]["ok"] is False


def test_an_accelerator_that_is_not_in_the_matrix_is_a_note(cli, toy):
    toy(ONE)
    assert by_name(cli("doctor", "-o", "json"))["toy.matrix"]["ok"] is None


def test_pretended_devices_have_no_driver_to_check(cli, toy, monkeypatch):
    toy("Discovery()")
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOY", "count=1,type=T9,memory=1GiB")
    found = by_name(cli("doctor", "-o", "json"))
    assert "(simulated)" in found["toy.discovery"]["text"]
    assert "toy.driver" not in found


def test_a_variable_of_a_vendor_that_cannot_be_read_as_meant_is_found(cli, toy, monkeypatch):
    toy("Discovery()")
    monkeypatch.setenv("TOY_VISIBLE_DEVICES", "0-3")
    check = by_name(cli("doctor", "-o", "json"))["visible-devices"]
    assert (check["ok"], check["next"]) == (
        False,
        ["unset TOY_VISIBLE_DEVICES, or list devices like TOY_VISIBLE_DEVICES=0,1"],
    )


def test_kinds_and_nodes_exclude_each_other(cli):
    outcome = cli("doctor", "cpu", "--node", "all", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (2, "HL100")


def test_the_nodes_of_no_cluster_cannot_be_asked(cli):
    outcome = cli("doctor", "--node", "all", "-o", "json")
    assert (outcome.code, outcome.error["code"]) == (1, "HL403")


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


def test_room_for_downloads_is_looked_for_where_they_go(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    check = checks.check_downloads()
    assert str(tmp_path / "hub") in check.text
    assert check.ok is not False, "a small model may fit all the same"


@pytest.mark.parametrize(("folder", "ok"), [("/tmp", True), ("/scratch/" + "x" * 60, False)])
def test_a_temporary_folder_too_deep_for_sockets_is_found(folder, ok):
    assert checks.check_temp(folder).ok is ok


@pytest.mark.parametrize(("soft", "ok"), [(1024, False), (4096, True), (resource.RLIM_INFINITY, True)])
def test_a_process_must_be_allowed_enough_open_files(soft, ok):
    check = checks.check_open_files(soft)
    assert check.ok is ok
    assert bool(check.next) is not ok


def test_a_token_for_its_owner_only_is_right(tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("secret")
    check = checks.check_token(token)
    assert check.ok is True
    assert "secret" not in check.text


@pytest.mark.parametrize(("mode", "content", "advice"), [(0o644, "secret", "chmod 600"), (0o600, " \n", "rm ")])
def test_a_token_open_to_others_and_an_empty_one_fail(tmp_path, mode, content, advice):
    token = tmp_path / "token"
    token.write_text(content)
    token.chmod(mode)
    check = checks.check_token(token)
    assert check.ok is False
    assert check.next[0].startswith(advice)


def test_a_token_that_is_named_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "gone"))
    assert checks.check_token().ok is False


def test_no_token_is_needed_before_there_is_a_cluster(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checks.check_token().ok is True
