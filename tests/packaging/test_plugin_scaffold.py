"""`plugins new` makes a vendor's distribution that is found, planned with and keeps the contract; the tutorial runs."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorials" / "first-plugin.md"
TEMPLATE = ROOT / "hetero_llm" / "plugin" / "template"
SITE = Path(sysconfig.get_paths()["purelib"])
COMMANDS = {"pip": "pip", "pytest": "pytest", "hetero-llm": "hetero_llm.cli"}
DEADLINE_S = 280
FILES = {
    "pyproject.toml",
    "README.md",
    *(f"hetero_llm_zeta/{name}.py" for name in ("__init__", "plugin", "discovery", "group", "engine", "checks")),
    "tests/test_contract.py",
    "tests/fake/zeta-smi",
}

pytestmark = pytest.mark.slow


class Environment:
    """A virtual environment with everything of this one, writable, and commands on its PATH."""

    def __init__(self, folder):
        venv.create(folder / "venv", symlinks=True)
        self.bin = folder / "venv" / "bin"
        self.work = folder / "work"
        self.work.mkdir()
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("HETERO_LLM_", "PYTEST"))}
        self.env |= {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HETERO_LLM_STATE_DIR": str(folder / "state"),
            "HETERO_LLM_LEASE_DIR": str(folder / "lease"),
            # No network: what is needed is there. The name says "no", and false is what switches isolation off.
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "false",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "NO_COLOR": "1",
        }
        site = next((folder / "venv" / "lib").glob("python*/site-packages"))
        for entry in SITE.iterdir():
            (site / entry.name).symlink_to(entry)
        for name, module in COMMANDS.items():
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec "{self.bin}/python" -m {module} "$@"\n')
            script.chmod(0o755)

    def run(self, script, cwd=None, **env):
        return subprocess.run(
            ["bash", "-euc", script],
            cwd=cwd or self.work,
            env={**self.env, **env},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def must(self, script, cwd=None, **env):
        done = self.run(script, cwd, **env)
        assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
        return done.stdout

    def data(self, script, cwd=None, **env):
        done = self.run(f"{script} -o json", cwd, **env)
        return done.returncode, json.loads(done.stdout)["data"]


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A plugin for the kind zeta, as a wheel of its own, installed."""
    environment = Environment(tmp_path_factory.mktemp("scaffold"))
    environment.must("hetero-llm plugins new zeta")
    environment.folder = environment.work / "hetero-llm-zeta"
    environment.must(
        "pip wheel -q --no-deps --wheel-dir dist . && pip install -q --no-deps dist/*.whl", environment.folder
    )
    environment.fake = {"PATH": f"{environment.folder}/tests/fake{os.pathsep}{environment.env['PATH']}"}
    return environment


def test_our_wheel_carries_every_file_of_the_template(tmp_path):
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        packed = {Path(name).name for name in wheel.namelist() if name.startswith("hetero_llm/plugin/template/")}
    assert packed == {path.name for path in TEMPLATE.iterdir()}
    assert len(packed) == len(FILES)


def plugins(environment):
    return {plugin["name"]: plugin for plugin in environment.data("hetero-llm plugins list")[1]["plugins"]}


def test_the_new_folder_has_the_five_files_a_contract_test_and_a_fake(installed):
    made = {str(path.relative_to(installed.folder)) for path in installed.folder.rglob("*") if path.is_file()}
    assert {name for name in made if "__pycache__" not in name and not name.startswith("dist/")} == FILES
    assert os.access(installed.folder / "tests/fake/zeta-smi", os.X_OK)


def test_nothing_of_the_templates_name_is_left(installed):
    for name in FILES:
        assert "acme" not in (installed.folder / name).read_text().lower(), name


def test_its_code_is_as_clean_as_ours(installed):
    rules = "E,F,W,I,B,UP,SIM,RUF,PTH,C4,RET"
    options = f"--isolated --no-cache --line-length 120 --target-version py311 --select {rules}"
    installed.must(f"{sys.executable} -m ruff check {options} .", installed.folder)
    installed.must(
        f"{sys.executable} -m ruff format --no-cache --check --isolated --line-length 120 .", installed.folder
    )
    installed.must(
        f"{sys.executable} -m mypy --strict --cache-dir {installed.work}/mypy hetero_llm_zeta", installed.folder
    )


def test_installed_it_is_listed_with_its_distribution(installed):
    found = plugins(installed)["zeta"]
    assert (found["status"], found["kind"], found["distribution"]) == ("loaded", "zeta", "hetero-llm-zeta")


def test_installed_its_devices_are_planned_on(installed):
    _, inventory = installed.data("hetero-llm devices", **installed.fake)
    (node,) = (node for node in inventory["nodes"] if node["kind"] == "zeta")
    assert [device["uid"] for device in node["devices"]] == ["zeta-SN0000", "zeta-SN0001"]
    code, plan = installed.data("hetero-llm plan smollm2-135m --kind zeta --replicas 2", **installed.fake)
    assert code == 0
    assert [replica["kind"] for replica in plan["replicas"]] == ["zeta", "zeta"]
    used = [place["devices"] for replica in plan["replicas"] for place in replica["placement"]]
    assert sorted(used) == [["zeta-SN0000"], ["zeta-SN0001"]]


def test_it_keeps_the_contract_of_levels_0_and_1_as_it_is(installed):
    code, answer = installed.data("hetero-llm plugins check zeta --contract tests/test_contract.py", installed.folder)
    failed = [test for test in answer["tests"] if test["outcome"] == "failed"]
    assert (code, failed) == (0, [])
    assert {test["level"] for test in answer["tests"]} == {0, 1}
    # Its fake has no handles that could stay open; everything else is checked.
    assert [test["test"] for test in answer["tests"] if test["outcome"] == "skipped"] == [
        "discovery and usage leave no context open"
    ]


def test_its_own_pytest_passes(installed):
    out = installed.must("pytest -q -p no:cacheprovider", installed.folder)
    assert " failed" not in out


def test_broken_at_import_it_is_told_of_and_the_others_work(installed, tmp_path):
    package = tmp_path / "hetero_llm_zeta"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text("raise OSError('libzeta.so.1: cannot open shared object file')\n")
    broken = {"PYTHONPATH": str(tmp_path)}
    code, answer = installed.data("hetero-llm plugins check zeta", **broken)
    assert code == 1
    assert "libzeta.so.1" in answer["tests"][0]["text"]
    _, listed = installed.data("hetero-llm plugins list", **broken)
    status = {plugin["name"]: plugin["status"] for plugin in listed["plugins"]}
    assert (status["zeta"], status["cpu"]) == ("failed", "loaded")


def test_a_name_that_an_installed_plugin_has_is_refused(installed):
    done = installed.run("hetero-llm plugins new zeta -o json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "HL211"


def blocks(text):
    """Return (script, whether it must fail) of each shell block, in order."""
    return [(body, "fails" in info.split()) for info, body in re.findall(r"^```sh(.*)\n((?:.*\n)*?)```$", text, re.M)]


def test_the_tutorial_runs_as_written(environment):
    found = blocks(TUTORIAL.read_text())
    assert len(found) >= 8
    assert [must_fail for _, must_fail in found].count(True) == 1
    script = "\n".join(f"if ({body}); then exit 9; fi" if must_fail else body for body, must_fail in found)
    out = environment.must(script)
    assert "libc.so.6" in out
    assert "acme-SN0000" in out
    assert "acme" not in plugins(environment)
    assert list((environment.work / "hetero-llm-acme" / "dist").glob("hetero_llm_acme-*.whl"))
