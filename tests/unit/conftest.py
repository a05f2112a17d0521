"""What the command-line tests share: run a command in this process and look at what it printed."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from hetero_llm.cli.entry import run


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)["data"]

    @property
    def error(self) -> Any:
        return json.loads(self.out)["error"]


@pytest.fixture
def cli_env(tmp_path, monkeypatch):
    """Folders of this test only, and no variable of the developer's."""
    for name in ("RAY_ADDRESS", "HETERO_LLM_CONFIG", "HETERO_LLM_DISABLE_PLUGINS", "OPENAI_API_KEY", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("STATE", "CACHE", "LEASE"):
        monkeypatch.setenv(f"HETERO_LLM_{name}_DIR", str(tmp_path / name.lower()))
    return tmp_path


@pytest.fixture
def cli(cli_env, capsys) -> Callable[..., Outcome]:
    """Run ``hetero-llm`` with the words given."""

    def call(*argv: object) -> Outcome:
        capsys.readouterr()
        code = run([str(word) for word in argv])
        out, err = capsys.readouterr()
        return Outcome(int(code), out, err)

    return call


@pytest.fixture
def cli_process(cli_env) -> Callable[..., Outcome]:
    """Run ``hetero-llm`` as a process of its own."""

    def call(*argv: object, **options: Any) -> Outcome:
        command = [sys.executable, "-m", "hetero_llm.cli", *(str(word) for word in argv)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call
