"""Discovery runs in a real child process against plugins installed into a folder on its path."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from hetero_llm.inventory.probe import DEADLINE_S, probe_kinds
from hetero_llm.plugin import Discovery

BACKEND = """
import os, signal, subprocess, sys, time
from hetero_llm.plugin import Backend, Device, Discovery, Health, hookimpl

class Toy(Backend):
    kind = "toynpu"
    api_version = "1.0"
    def discover(self):
        {discover}
    def versions(self): return {{"driver": "1.0"}}
    def device_env(self, devices): return {{}}
    def group(self, spec): raise NotImplementedError
    def engine(self, spec): raise NotImplementedError
    def check_model(self, facts, accelerator, wish): return ()

@hookimpl
def hetero_llm_backends(): return (Toy(),)
"""
TWO_DEVICES = """
        print("library chatter")
        os.write(1, b"chatter from C")
        return Discovery(devices=tuple(
            Device(kind="toynpu", accelerator="T1", uid=f"t{i}", index=i,
                   health=Health.FAILED if i == 0 else Health.OK) for i in range(2)))
"""

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a plugin of kind ``toynpu`` with the given body of `discover`."""

    def write(discover: str) -> None:
        (tmp_path / "toy_probe_plugin.py").write_text(BACKEND.format(discover=discover))
        info = tmp_path / "toy_probe_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-probe-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[hetero_llm.backends]\ntoynpu = toy_probe_plugin\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return write


def discover(deadline_s: float = DEADLINE_S) -> Discovery:
    return probe_kinds(["toynpu"], deadline_s)["toynpu"].discovery


def test_devices_come_back_whole_although_libraries_print_to_stdout(install: Install) -> None:
    install(TWO_DEVICES)
    found = discover()
    assert [(device.uid, device.index, device.health) for device in found.devices] == [
        ("t0", 0, "failed"),
        ("t1", 1, "ok"),
    ]
    assert found.problems == ()


def test_a_plugin_cannot_put_another_engine_in_the_place_of_its_own(install: Install) -> None:
    install(TWO_DEVICES.replace("index=i,", "index=i, simulated=True, stand_in='sim',"))
    found = discover()
    assert found.devices == ()
    assert [(problem.code, "stand-in" in problem.text) for problem in found.problems] == [("HL203", True)]


def test_versions_come_with_the_devices(install: Install) -> None:
    install(TWO_DEVICES)
    assert probe_kinds(["toynpu"])["toynpu"].versions == {"driver": "1.0"}


@pytest.fixture
def hanging(install: Install, tmp_path: Path) -> Path:
    """Install a plugin that hangs; return the file its process ids are in once it does."""
    install(f"""
        tool = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "pids.new")!r}, "w").write(f"{{os.getpid()}} {{tool.pid}}")
        os.rename({str(tmp_path / "pids.new")!r}, {str(tmp_path / "pids")!r})
        sys.stderr.write("waiting for the driver\\n"); sys.stderr.flush()
        time.sleep(600)
""")
    return tmp_path / "pids"


def test_a_discovery_that_is_stopped_ends_at_once_and_leaves_nothing(
    hanging: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, stopped = tmp_path / "scratch", threading.Event()
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def stop_once_it_hangs() -> None:
        while not hanging.exists():
            time.sleep(0.02)
        stopped.set()

    threading.Thread(target=stop_once_it_hangs).start()
    (problem,) = probe_kinds(["toynpu"], 60.0, stopped=stopped)["toynpu"].discovery.problems
    assert problem.code == "HL202"
    assert [pid for pid in hanging.read_text().split() if _is_alive(int(pid))] == []
    assert list(scratch.iterdir()) == []


def test_a_discovery_that_hangs_is_a_problem_at_the_deadline_and_leaves_no_process(hanging: Path) -> None:
    started = time.monotonic()
    found = discover(deadline_s=3.0)
    assert time.monotonic() - started < 10
    assert [problem.code for problem in found.problems] == ["HL202"]
    assert "3 s" in found.problems[0].text
    assert "waiting for the driver" in found.problems[0].text
    assert [pid for pid in hanging.read_text().split() if _is_alive(int(pid))] == []


def test_a_crash_is_a_problem_with_the_last_line_of_stderr(install: Install) -> None:
    install('raise RuntimeError("libvendor.so: driver is not loaded")')
    found = discover()
    assert [problem.code for problem in found.problems] == ["HL203"]
    assert "RuntimeError: libvendor.so: driver is not loaded" in found.problems[0].text
    assert found.problems[0].next


def test_a_silent_death_names_the_signal(install: Install) -> None:
    install("os.kill(os.getpid(), signal.SIGSEGV)")
    assert "ended by signal 11" in discover().problems[0].text


def test_an_answer_of_the_wrong_shape_is_a_problem(install: Install) -> None:
    install("return Discovery(devices=(1, 2))")
    assert [problem.code for problem in discover().problems] == ["HL203"]


def test_a_failing_kind_does_not_touch_another(install: Install) -> None:
    install('raise RuntimeError("gone")')
    found = probe_kinds(["cpu", "toynpu"])
    assert found["cpu"].discovery.devices
    assert found["toynpu"].discovery.problems


def test_a_background_process_of_a_driver_tool_does_not_delay_the_answer(install: Install, tmp_path: Path) -> None:
    install(f"""
        tool = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "pids")!r}, "w").write(str(tool.pid))
        return Discovery(source="toy")
""")
    assert discover(deadline_s=30).source == "toy"
    assert not _is_alive(int((tmp_path / "pids").read_text()))


def _is_alive(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return False
        time.sleep(0.05)
    return Path(f"/proc/{pid}").exists()
