"""Breaking any single parsing rule of the cuda and ascend backends makes a test of theirs fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from parse_mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
FILES = sorted({mutant.tests for mutant in MUTANTS})

pytestmark = pytest.mark.slow


def test_each_rule_has_a_name_of_its_own() -> None:
    rules = [(mutant.file, mutant.rule) for mutant in MUTANTS]
    assert len(set(rules)) == len(rules)


@pytest.mark.parametrize("tests", FILES)
def test_an_unchanged_copy_passes_what_the_mutants_are_tried_with(tests: str, tmp_path: Path) -> None:
    kind = tests.split("_")[1]
    copied(f"hetero_llm_{kind}", tmp_path)
    code, output = tried(tests, " or ".join(mutant.only for mutant in MUTANTS if mutant.tests == tests), tmp_path)
    assert code == 0, output


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{Path(mutant.file).stem}-{mutant.rule}")
def test_a_broken_rule_is_noticed(mutant: Mutant, tmp_path: Path) -> None:
    copied(Path(mutant.file).parts[0], tmp_path)
    file = tmp_path / mutant.file
    source = file.read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    broken = source.replace(mutant.old, mutant.new)
    compile(broken, file, "exec")
    file.write_text(broken, encoding="utf-8")
    code, output = tried(mutant.tests, mutant.only, tmp_path)
    # 1 is a test that failed; a file that cannot be imported is another code, and would say nothing of the rule.
    assert code == 1, output
    assert "1 failed" in output


def copied(package: str, folder: Path) -> None:
    """Copy a backend's package into `folder`; the tree itself is never touched."""
    kind = package.removeprefix("hetero_llm_")
    source = ROOT / "backends" / kind / package
    shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def tried(tests: str, only: str, packages: Path) -> tuple[int, str]:
    """Run some tests of a file with the packages in a folder before those of the tree; return code and output."""
    argv = (sys.executable, "-m", "pytest", f"tests/unit/{tests}", "-x", "-q", "-p", "no:cacheprovider", "-k", only)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env["PYTHONPATH"] = f"{packages}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 0 and " skipped" in done.stdout and " passed" not in done.stdout:
        pytest.skip(f"tests/unit/{tests} cannot be run here: {done.stdout.splitlines()[-2]}")
    return done.returncode, done.stdout + done.stderr
