"""Run the contract tests on an installed plugin, in a process that may crash or hang without taking this one along."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_llm.errors import ContractNotRun
from hetero_llm.plugin import Backend
from hetero_llm.plugin.manager import PluginManager, PluginRecord

DEADLINE_S = (300.0, 600.0, 3600.0)
"""Time for all tests up to a level; engines of level 2 load weights."""

_BACKEND_ENV = "HETERO_CONTRACT_BACKEND"
_LAST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractTest:
    """How one contract test ended.

    Attributes:
        test: the promise, as a sentence.
        level: 0, 1 or 2; None for tests of the plugin's own.
        outcome: ``passed``, ``failed`` or ``skipped``.
        text: why it failed or was skipped.
    """

    test: str
    level: int | None
    outcome: str
    text: str | None = None


def find_record(manager: PluginManager, name: str) -> PluginRecord:
    """Return the plugin called `name`: a kind, an entry point, or a distribution.

    Raises:
        UnknownKind: nothing installed is called so.
    """
    for record in manager.records():
        if name in (record.kind, record.name, record.distribution):
            return record
    manager.backend(name)
    raise AssertionError(f"a backend {name!r} without a record")


def not_loaded(record: PluginRecord) -> ContractTest:
    """Return the failure of a plugin without a usable backend, in the form of a test."""
    why = record.reason or "it provides no backend"
    return ContractTest(test="the plugin is found by its entry point and loaded", level=0, outcome="failed", text=why)


def run_contract(backend: Backend, level: int, file: Path | None) -> tuple[ContractTest, ...]:
    """Run the contract on `backend` up to `level`, with the fakes of the vendor's test `file` where one is given.

    Raises:
        ContractNotRun: pytest is missing, or the process ended without results.
    """
    if importlib.util.find_spec("pytest") is None:
        raise ContractNotRun("the contract tests need pytest", next=(f"{sys.executable} -m pip install pytest",))
    with tempfile.TemporaryDirectory(prefix="hetero-llm-check-") as folder:
        report = Path(folder) / "report.json"
        said = _run(_argv(file, report, level), backend, DEADLINE_S[level])
        if not report.exists():
            raise _nothing(backend, said)
        answer = json.loads(report.read_bytes())
    if not answer["results"]:
        raise _nothing(backend, said)
    return tuple(ContractTest(**result) for result in answer["results"])


def _argv(file: Path | None, report: Path, level: int) -> list[str]:
    tests = file.resolve() if file else _installed_contract()
    return [sys.executable, "-m", "hetero_llm.testing.check", str(tests), str(report), str(level)]


def _installed_contract() -> Path:
    import hetero_llm

    return Path(hetero_llm.__file__).parent / "testing" / "installed.py"


def _run(argv: Sequence[str], backend: Backend, deadline_s: float) -> str:
    env: dict[str, Any] = {**os.environ, _BACKEND_ENV: f"{type(backend).__module__}:{type(backend).__qualname__}"}
    # A file and not a pipe: what a plugin leaves running keeps a pipe open, and reading it to its end would never end.
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            child.wait(deadline_s)
        except subprocess.TimeoutExpired as error:
            raise ContractNotRun(
                f"the contract tests did not end within {deadline_s:g} s", next=("--level N, with a lower N",)
            ) from error
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        said.seek(0)
        return said.read().decode(errors="replace")


def _nothing(backend: Backend, said: str) -> ContractNotRun:
    last = said.strip().splitlines()[-_LAST_LINES:]
    return ContractNotRun(
        f"the contract tests of {backend.kind!r} ended without a result", cause=" | ".join(last) or "they said nothing"
    )
