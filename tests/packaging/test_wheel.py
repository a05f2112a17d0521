"""What is inside the wheel, and that an editable install finds the same."""

import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
BACKENDS = ("hetero_llm_ascend", "hetero_llm_cpu", "hetero_llm_cuda")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from an sdist-free copy of nothing: straight from the tree, without network."""
    folder = tmp_path_factory.mktemp("dist")
    script = f"from hatchling.build import build_wheel; print(build_wheel({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(folder / done.stdout.split()[-1]) as archive:
        yield archive


def test_the_wheels_top_level_names_are_ours_only(wheel):
    names = {Path(name).parts[0] for name in wheel.namelist()}
    info = {name for name in names if name.endswith(".dist-info")}
    assert len(info) == 1
    assert names - info == {"hetero_llm", *BACKENDS}


def test_the_hardware_matrix_is_in_the_wheel(wheel):
    packed = wheel.read("hetero_llm/hardware_matrix.yaml")
    assert packed == (ROOT / "hardware_matrix.yaml").read_bytes()
    assert yaml.safe_load(packed)


def test_every_module_of_the_tree_is_in_the_wheel(wheel):
    sources = {
        ROOT / "hetero_llm": ROOT,
        **{ROOT / "backends" / name[11:] / name: ROOT / "backends" / name[11:] for name in BACKENDS},
    }
    expected = {str(path.relative_to(top)) for folder, top in sources.items() for path in folder.rglob("*.py")}
    assert expected <= set(wheel.namelist())
    assert "hetero_llm/py.typed" in wheel.namelist()


def test_no_test_and_no_cache_is_in_the_wheel(wheel):
    assert not [name for name in wheel.namelist() if "test" in Path(name).name or "__pycache__" in name]


def test_the_license_is_in_the_wheel(wheel):
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_the_wheel_has_the_console_script_and_the_backends(wheel):
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    text = wheel.read(name).decode()
    assert "hetero-llm = hetero_llm.cli:main" in text
    kinds = "\n".join(f"{kind} = hetero_llm_{kind}.plugin" for kind in ("ascend", "cpu", "cuda"))
    assert f"[hetero_llm.backends]\n{kinds}" in text


def test_the_wheel_imports_on_its_own(wheel, tmp_path):
    wheel.extractall(tmp_path)
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "import hetero_llm.matrix, hetero_llm_cpu; print(hetero_llm.__file__); hetero_llm.matrix.load_matrix()"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(tmp_path))


@pytest.mark.parametrize("group", ["console_scripts", "hetero_llm.backends"])
def test_the_installed_entry_points_load(group):
    ours = [entry for entry in entry_points(group=group) if entry.dist and entry.dist.name == "hetero-llm"]
    assert ours
    for entry in ours:
        assert entry.load()


def test_the_declared_entry_points_are_the_installed_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {e.name for e in entry_points(group="hetero_llm.backends") if e.dist and e.dist.name == "hetero-llm"}
    assert installed == set(project["entry-points"]["hetero_llm.backends"])


def test_no_folder_above_the_packages_is_a_package():
    for folder in ("backends", "tests"):
        assert not (ROOT / folder / "__init__.py").exists()
