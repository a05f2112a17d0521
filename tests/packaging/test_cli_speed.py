"""The command line starts fast because it imports little."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 0.25
RUNS = 7
HEAVY = (
    "torch",
    "vllm",
    "ray",
    "pydantic",
    "pydantic_settings",
    "fastapi",
    "httpx",
    "transformers",
    "rich",
    "rich_click",
    "yaml",
)
SCRIPT = Path(sys.executable).parent / "hetero-llm"


def imported_by(*argv: str) -> set[str]:
    script = (
        "import json, sys\nfrom hetero_llm.cli.entry import run\n"
        f"run({list(argv)!r})\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_help_imports_nothing_heavy():
    assert imported_by("--help").isdisjoint(HEAVY)


@pytest.mark.parametrize("verb", ["serve", "plan", "devices", "status", "stop", "chat", "doctor"])
def test_a_verbs_help_imports_no_engine_and_no_cluster(verb):
    allowed = {"rich", "rich_click"}
    assert imported_by(verb, "--help").isdisjoint(set(HEAVY) - allowed)


def test_help_takes_less_than_a_quarter_of_a_second():
    # The fastest of several runs: other load on the machine makes runs slower, never faster.
    assert min(wall_s([SCRIPT, "--help"]) for _ in range(RUNS)) < LIMIT_S


def wall_s(command: list[os.PathLike[str] | str]) -> float:
    start_s = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start_s
