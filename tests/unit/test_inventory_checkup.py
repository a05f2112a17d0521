"""The doctor's checks run in real child processes, against a plugin installed into a folder on their path."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetero_llm.inventory.checkup import plugin_checks
from hetero_llm.plugin import Check

PLUGIN = """
import os, signal, subprocess, sys, time
from hetero_llm.plugin import Backend, Check, Discovery, hookimpl

class Toy(Backend):
    kind = "toynpu"
    api_version = "1.0"
    def discover(self): return Discovery()
    def versions(self): return {{}}
    def device_env(self, devices): return {{}}
    def group(self, spec): raise NotImplementedError
    def engine(self, spec): raise NotImplementedError
    def check_model(self, facts, accelerator, wish): return ()
    def doctor(self):
        {doctor}

@hookimpl
def hetero_llm_backends(): return (Toy(),)

@hookimpl
def hetero_llm_doctor_checks(): {own}
"""
GOOD = 'return (Check(name="toynpu.driver", ok=False, text="too old", next=("update it",)),)'
OWN = "toy-checkup-plugin:toynpu"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a plugin of kind ``toynpu`` with the given bodies of its checks."""

    def write(doctor: str, own: str = "return ()") -> None:
        (tmp_path / "toy_checkup_plugin.py").write_text(PLUGIN.format(doctor=doctor, own=own))
        info = tmp_path / "toy_checkup_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-checkup-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[hetero_llm.backends]\ntoynpu = toy_checkup_plugin\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def test_checks_come_back_whole_although_libraries_print_to_stdout(install: Install) -> None:
    install(f'print("chatter"); os.write(1, b"chatter from C"); {GOOD}')
    assert plugin_checks(["toynpu"]) == (Check(name="toynpu.driver", ok=False, text="too old", next=("update it",)),)


def test_only_the_kinds_asked_for_are_checked(install: Install) -> None:
    install("raise RuntimeError('not asked')")
    assert {check.name.partition(".")[0] for check in plugin_checks(["cpu"])} == {"cpu"}


def test_a_doctor_that_hangs_is_one_failing_check_which_names_it_and_the_others_answer(
    install: Install, tmp_path: Path
) -> None:
    install(f"""
        tools = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
        open({str(tmp_path / "pids")!r}, "w").write(" ".join(str(p) for p in (os.getpid(), *(t.pid for t in tools))))
        sys.stderr.write("waiting for the driver\\n"); sys.stderr.flush()
        time.sleep(600)
""")
    checks = {check.name: check for check in plugin_checks(["toynpu", "cpu"], deadline_s=8.0)}
    hung = checks.pop("toynpu.doctor")
    assert (hung.ok, hung.text) == (
        False,
        "the check itself did not answer within 8 s; last said: waiting for the driver",
    )
    assert "cpu.memory" in checks
    assert [pid for pid in (tmp_path / "pids").read_text().split() if _is_alive(int(pid))] == []


@pytest.mark.parametrize(
    ("doctor", "why"),
    [
        ("raise RuntimeError('driver gone')", "RuntimeError: driver gone"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11"),
        ("sys.exit(3)", "exit status 3"),
        ("return None", "'NoneType' object is not iterable"),
        ("return ('all is well',)", "its answer cannot be read: Expected `object`, got `str`"),
    ],
)
def test_a_doctor_that_fails_is_one_failing_check_with_the_reason(install: Install, doctor: str, why: str) -> None:
    install(doctor)
    (check,) = plugin_checks(["toynpu"])
    assert (check.name, check.ok) == ("toynpu.doctor", False)
    assert check.text.startswith("the check itself failed: ")
    assert why in check.text


def test_checks_of_a_plugin_that_belong_to_no_kind_are_kept_apart_from_those_that_crash(install: Install) -> None:
    install("os.kill(os.getpid(), signal.SIGKILL)", own='return [Check(name="licence", ok=True, text="valid")]')
    assert [(check.name, check.ok) for check in plugin_checks(["toynpu"], [OWN])] == [
        ("toynpu.doctor", False),
        ("licence", True),
    ]


def test_a_plugins_own_check_that_raises_is_a_failing_check_named_after_the_plugin(install: Install) -> None:
    install(GOOD, own="raise RuntimeError('no licence server')")
    (check,) = plugin_checks([], [OWN])
    assert (check.name, check.ok) == (f"{OWN}.doctor", False)
    assert "no licence server" in check.text


def _is_alive(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return Path(f"/proc/{pid}").exists()
