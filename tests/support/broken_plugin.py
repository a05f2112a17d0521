"""A good plugin, as `plugins new` writes it, and the means to break one promise of it.

A mutant is a tuple: one or more changes ``(file, old, new)``, then the contract test that must fail. Each is
a folder of its own, tested in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from hetero_llm.cli.plugin_scaffold import create

DEADLINE_S = 200
QUICK = ("discovery.py", "_DEADLINE_S = 5.0", "_DEADLINE_S = 0.5")
IMPORTS = "from hetero_llm_acme import checks, discovery, engine, group\n"

Change = tuple[str, str, str]


def plugin(old: str, new: str) -> Change:
    return ("plugin.py", old, new)


def discovery(old: str, new: str) -> Change:
    return ("discovery.py", old, new)


def group(old: str, new: str) -> Change:
    return ("group.py", old, new)


def engine(old: str, new: str) -> Change:
    return ("engine.py", old, new)


def checks(old: str, new: str) -> Change:
    return ("checks.py", old, new)


def at_import(statement: str) -> Change:
    return plugin(IMPORTS, f"{IMPORTS}{statement}\n")


def good_plugin(parent: Path) -> Path:
    """Write the plugin, metadata that installs it, and two libraries that do nothing; return the folder."""
    folder = create("acme", parent).folder
    info = folder / "hetero_llm_acme-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetero-llm-acme\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[hetero_llm.backends]\nacme = hetero_llm_acme.plugin\n")
    (folder / "pyrsmi.py").touch()
    (folder / "sglang.py").touch()
    _edit(folder, QUICK)
    return folder


def outcomes(folder: Path, level: int) -> dict[str, str]:
    """Run the contract of the plugin in `folder`; return test to ``passed``, ``failed`` or ``skipped``."""
    report = folder / "report.json"
    tests = folder / "tests" / "test_contract.py"
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HETERO_LLM_", "PYTEST"))}
    done = subprocess.run(
        [sys.executable, "-m", "hetero_llm.testing.check", str(tests), str(report), str(level)],
        env={**env, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    return {result["test"]: result["outcome"] for result in json.loads(report.read_bytes())["results"]}


def outcome_of_broken(parent: Path, mutant: tuple, level: int) -> str | None:
    """Break the good plugin as `mutant` says and return the outcome of the test it names."""
    folder = good_plugin(parent)
    *changes, promise = mutant
    for change in changes:
        _edit(folder, change)
    return outcomes(folder, level).get(promise)


def _edit(folder: Path, change: Change) -> None:
    name, old, new = change
    path = folder / "hetero_llm_acme" / name
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {name}"
    path.write_text(text.replace(old, new))
