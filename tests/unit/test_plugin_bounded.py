"""Programs that may get stuck: what they say is returned, and one that does not end is killed in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hetero_llm.plugin import bounded

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""


def test_status_and_both_outputs_are_returned() -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    done = bounded.run((sys.executable, "-c", code), os.environ, 60)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"err\n")


def test_it_has_the_environment_given_and_no_input() -> None:
    code = "import os, sys; print(os.environ.get('X'), repr(sys.stdin.read()))"
    assert bounded.run((sys.executable, "-c", code), {"X": "1"}, 60).stdout == b"1 ''\n"


def test_one_that_does_not_end_is_killed_and_gone(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        bounded.run((sys.executable, "-c", STUBBORN, str(pid_file)), os.environ, 5)
    assert not psutil.pid_exists(int(pid_file.read_text()))


def test_one_whose_own_child_holds_its_output_open_does_not_hold_the_caller(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 600 & echo $! > {pid_file}; exit 0"
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        bounded.run(("/bin/sh", "-c", script), os.environ, 1)
    assert time.monotonic() - began < 60
    os.kill(int(pid_file.read_text()), 9)


def test_one_that_cannot_be_started_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        bounded.run((str(tmp_path / "none"),), os.environ, 1)
