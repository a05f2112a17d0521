"""The plugin as a vendor ships it: a wheel of its own, there after `pip install`, gone after `pip uninstall`."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "plugins" / "hetero-llm-sim"
SITE = Path(sysconfig.get_paths()["purelib"])


def run(*argv, **env):
    base = {name: value for name, value in os.environ.items() if not name.startswith("HETERO_LLM_")}
    # Python takes modules from the folder it is started in, and that must not be this tree.
    done = subprocess.run(
        [str(word) for word in argv],
        env={**base, **env},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def built(project, folder):
    """Build the wheel of a project's folder, without network."""
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=project, capture_output=True, text=True, check=True)
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(PLUGIN, tmp_path_factory.mktemp("dist"))


@pytest.fixture
def other_venv(tmp_path):
    """A virtual environment with this one's dependencies and hetero-llm from its wheel: no plugin, nothing editable."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").strip())
    for entry in SITE.iterdir():
        if "hetero_llm" not in entry.name and entry.name != "__pycache__":
            (site / entry.name).symlink_to(entry)
    run(*pip(python), "install", "-q", "--no-deps", "--no-index", built(ROOT, tmp_path))
    return python


def pip(python):
    return sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python


def plugins(python, **env):
    records = json.loads(run(python, "-m", "hetero_llm.cli", "plugins", "list", "-o", "json", **env))["data"]
    records = records["plugins"] if isinstance(records, dict) else records
    return {record["name"]: record for record in records}


def test_the_wheel_holds_the_package_its_data_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    top = {Path(name).parts[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"hetero_llm_sim"}
    sources = {f"hetero_llm_sim/{path.name}" for path in (PLUGIN / "hetero_llm_sim").glob("*.*")}
    assert sources <= set(names)
    assert "[hetero_llm.backends]\nsim = hetero_llm_sim.plugin" in entry_points


@pytest.mark.slow
def test_installed_it_is_listed_and_planned_with_and_uninstalled_it_is_gone(other_venv, wheel):
    assert "sim" not in plugins(other_venv)
    run(*pip(other_venv), "install", "-q", "--no-deps", "--no-index", wheel)
    assert plugins(other_venv)["sim"]["status"] == "loaded"
    plan = (other_venv, "-m", "hetero_llm.cli", "plan", "smollm2-135m", "--replicas", "2", "-o", "json")
    planned = json.loads(run(*plan, HETERO_LLM_SIM_DEVICES="fast,slow"))["data"]
    assert sorted((replica["kind"], replica["accelerator"]) for replica in planned["replicas"]) == [
        ("sim", "fast"),
        ("sim", "slow"),
    ]
    run(*pip(other_venv), "uninstall", "-q", "-y", "hetero-llm-sim")
    assert "sim" not in plugins(other_venv)


def test_in_the_clean_environment_nothing_of_ours_comes_from_this_tree(other_venv):
    modules = ("hetero_llm", "hetero_llm_ascend", "hetero_llm_cpu", "hetero_llm_cuda")
    for module in modules:
        file = run(other_venv, "-c", f"import {module}; print({module}.__file__)").strip()
        assert Path(file).is_relative_to(other_venv.parents[1])
    assert set(plugins(other_venv)) == {"ascend", "cpu", "cuda"}


def test_broken_at_import_it_leaves_the_others_working_and_says_why(tmp_path):
    package = tmp_path / "hetero_llm_sim"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text("raise OSError('libsim.so.1: cannot open shared object file')\n")
    found = plugins(sys.executable, PYTHONPATH=str(tmp_path))
    assert found["cpu"]["status"] == "loaded"
    assert found["sim"]["status"] == "failed"
    assert "libsim.so.1" in found["sim"]["reason"]
