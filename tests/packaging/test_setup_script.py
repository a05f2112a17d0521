"""`scripts/setup.sh` with a stand-in for Python and pip: what it asks of them, and what it says."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """\
#!/usr/bin/env bash
# Answers as CPython 3.11 with pip would; each pip call is one line of calls.log.
here="$(cd "$(dirname "$0")" && pwd)"
case "$*" in
  "-c import sys"*) echo "${FAKE_VERSION:-3.11}" ;;
  "-m venv"*) dir="${@: -1}"; mkdir -p "$dir/bin"; cp "$0" "$dir/bin/python" ;;
  *"pip show torch"*) exit 1 ;;
  *"-m pip"*)
    echo "${@:3}" >> "$CALLS"
    if [[ "$*" == *" download -"* && -n "${FAKE_NO_TORCH:-}" ]]; then
      echo "no matching distribution" >&2
      exit 1
    fi
    if [[ "$*" == *requirements/cpu.txt* && -n "${FAKE_BROKEN:-}" ]]; then
      echo "pip's own words" >&2
      exit 1
    fi
    if [[ "$*" == *"-e ."* ]]; then
      touch "$here/hetero-llm"
      chmod +x "$here/hetero-llm"
    fi ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A copy of what the script reads, with a stand-in `python3.11`."""
    plugin = "plugins/hetero-llm-sim/pyproject.toml"
    for name in ("requirements/cpu.txt", "requirements/dev.txt", "pyproject.toml", plugin, "scripts/setup.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / "tools" / "python3.11"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    return tmp_path


@pytest.fixture
def setup(project):
    def run(**env: str) -> subprocess.CompletedProcess[str]:
        path = f"{project / 'tools'}:{os.environ['PATH']}"
        variables = {**os.environ, "PATH": path, "CALLS": str(project / "calls.log"), "VENV": ".venv", **env}
        command = [str(project / "scripts" / "setup.sh")]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)

    return run


def calls(project) -> list[str]:
    log = project / "calls.log"
    return log.read_text().splitlines() if log.exists() else []


def test_it_installs_the_lock_without_dependencies_and_then_the_project(setup, project):
    done = setup()
    assert done.returncode == 0, done.stderr
    locked = next(call for call in calls(project) if "requirements/cpu.txt" in call)
    assert "--no-deps" in locked
    assert "-r requirements/dev.txt" in locked
    assert "extra-index-url" not in locked
    assert calls(project)[-1].endswith("--no-deps --no-build-isolation -e . -e plugins/hetero-llm-sim")


def test_a_second_run_asks_nothing_of_pip(setup, project):
    setup()
    before = calls(project)
    done = setup()
    assert (done.returncode, done.stderr) == (0, "")
    assert calls(project) == before


def test_a_changed_lock_is_installed_again(setup, project):
    setup()
    before = len(calls(project))
    with (project / "requirements" / "dev.txt").open("a") as lock:
        lock.write("another==1\n")
    setup()
    assert len(calls(project)) > before


def test_an_index_without_the_cpu_torch_is_helped_out_by_pytorchs_own_and_it_says_so(setup, project):
    done = setup(FAKE_NO_TORCH="1")
    assert done.returncode == 0
    assert "no torch==" in done.stderr
    locked = next(call for call in calls(project) if "requirements/cpu.txt" in call)
    assert "--extra-index-url https://download.pytorch.org/whl/cpu" in locked


def test_a_missing_python_is_named_with_what_to_do(setup):
    done = setup(PYTHON="python3.11-of-nobody")
    assert done.returncode == 1
    assert done.stderr.startswith("error: python3.11-of-nobody is not installed")
    assert "next: " in done.stderr


def test_another_python_is_refused(setup, project):
    done = setup(FAKE_VERSION="3.13")
    assert done.returncode == 1
    assert "3.13" in done.stderr
    assert calls(project) == []


def test_a_failed_install_fails_and_the_next_run_tries_again(setup, project):
    done = setup(FAKE_BROKEN="1")
    assert done.returncode == 1
    assert "pip's own words" in done.stderr
    assert setup().returncode == 0
