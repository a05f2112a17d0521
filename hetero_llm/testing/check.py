"""``python -m hetero_llm.testing.check FILE REPORT LEVEL``: run the contract tests of FILE, write how each ended.

The process that ``hetero-llm plugins check`` starts: a plugin that crashes or hangs takes only this one along. Neither
the configuration nor the pytest plugins of the folder it is run in take part, so the answer is the same everywhere.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hetero_llm.model import to_data
from hetero_llm.testing.contract import BackendContract
from hetero_llm.testing.levels import level_of

BACKEND_ENV = "HETERO_CONTRACT_BACKEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one test ended.

    Attributes:
        test: the sentence its name says.
        level: level of the contract; None for tests of the plugin's own.
        outcome: ``passed``, ``failed`` or ``skipped``.
        text: why it failed or was skipped.
    """

    test: str
    level: int | None
    outcome: str
    text: str | None = None


class Collector:
    """A pytest plugin that keeps the result of every test, in the order they ran."""

    def __init__(self, level: int) -> None:
        self.results: dict[str, Result] = {}
        self._level = level
        self._levels: dict[str, int | None] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is on a higher level; lower levels go first."""
        for item in items:
            self._levels[item.nodeid] = _level(item)
        above = [item for item in items if (self._levels[item.nodeid] or 0) > self._level]
        config.hook.pytest_deselected(items=above)
        kept = [item for item in items if item not in above]
        items[:] = sorted(kept, key=lambda item: self._levels[item.nodeid] or 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep a file or class that cannot even be collected as a failure."""
        if report.failed:
            self._keep(report.nodeid, f"{report.nodeid or 'the file'} can be read", None, "failed", _reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what the test itself says, or what kept it from running or ending well."""
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            text = None if report.outcome == "passed" else _reason(report)
            self._keep(report.nodeid, _sentence(name), self._levels.get(report.nodeid), report.outcome, text)

    def _keep(self, key: str, test: str, level: int | None, outcome: str, text: str | None) -> None:
        self.results[key] = Result(test=test, level=level, outcome=outcome, text=text)


def _level(item: pytest.Item) -> int | None:
    function, owner = getattr(item, "function", None), getattr(item, "cls", None)
    if owner is None or not issubclass(owner, BackendContract):
        return None
    return level_of(function) if hasattr(BackendContract, getattr(function, "__name__", "")) else None


def _sentence(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


def _reason(report: Any) -> str:
    """Return why a test failed, in the contract's words, or why it was skipped."""
    what = report.longrepr
    if isinstance(what, tuple):
        return str(what[2]).removeprefix("Skipped: ")
    crash = getattr(what, "reprcrash", None)
    text = str(crash.message if crash is not None else what)
    # Below the message of an assert pytest shows the compared values; the message says it in words.
    return text.split("\nassert ")[0].removeprefix("AssertionError: ").strip()


def main(file: Path, level: int) -> tuple[int, tuple[Result, ...]]:
    """Run the tests of `file` up to `level`; return pytest's exit status and the results."""
    collector = Collector(level)
    words = [str(file), "-q", "-c", os.devnull, "--rootdir", str(file.parent), "-p", "no:cacheprovider"]
    status = pytest.main([*words, "-p", "hetero_llm.testing.options", "--hetero-level", str(level)], [collector])
    return int(status), tuple(collector.results.values())


if __name__ == "__main__":
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    found = main(Path(sys.argv[1]), int(sys.argv[3]))
    Path(sys.argv[2]).write_bytes(msgspec.json.encode({"status": found[0], "results": to_data(found[1])}))
