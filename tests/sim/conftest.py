"""Simulated engines as processes, and a client that sees the bytes as they come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, Queue
from typing import Any

import httpx
import pytest

READY_DEADLINE_S = 60


class EngineUnderTest:
    """One simulated engine as a child process, listening on a port of the system's choice."""

    def __init__(self, argv: Sequence[str], env: dict[str, str]) -> None:
        self.argv = (sys.executable, "-m", "hetero_llm_sim.engine", *argv)
        base = {name: value for name, value in os.environ.items() if not name.startswith("HETERO_LLM_SIM_")}
        self.process = subprocess.Popen(self.argv, env={**base, **env}, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._lines: Queue[str | None] = Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.client: httpx.Client | None = None

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def wait_until_it_listens(self) -> EngineUnderTest:
        deadline = time.monotonic() + READY_DEADLINE_S
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left_s)
            except Empty:
                break
            assert line is not None, "".join(self.log)
            if match := re.search(r"listening on ([\d.]+):(\d+)", line):
                self.host, self.port = match[1], int(match[2])
                self.client = httpx.Client(base_url=f"http://{self.host}:{self.port}", timeout=30, trust_env=False)
                return self
        raise AssertionError("the engine did not start in time: " + "".join(self.log))

    @property
    def http(self) -> httpx.Client:
        assert self.client is not None
        return self.client

    def new_client(self, timeout_s: float = 30) -> httpx.Client:
        return httpx.Client(base_url=self.http.base_url, timeout=timeout_s, trust_env=False)

    def faults(self, line: str) -> None:
        assert self.http.post("/sim/faults", json={"faults": line}).status_code == 200

    def complete(self, prompt: Any = "hello", max_tokens: int = 5, **more: Any) -> dict[str, Any]:
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, **more}
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def metric(self, name: str) -> float:
        page = self.http.get("/metrics").text
        return sum(
            float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", page, re.MULTILINE)
        )

    @staticmethod
    def eventually(condition: Callable[[], bool]) -> None:
        """Return when `condition` holds; fail after a generous time."""
        deadline = time.monotonic() + READY_DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def stop(self) -> int:
        if self.client is not None:
            self.client.close()
        self.process.terminate()
        code = self.process.wait(30)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code


@pytest.fixture
def start_engine() -> Iterator[Callable[..., EngineUnderTest]]:
    """Start engines; whatever is left of them is gone after the test."""
    started: list[EngineUnderTest] = []

    def start(*argv: str, listens: bool = True, **env: str) -> EngineUnderTest:
        engine = EngineUnderTest(("--served-model-name", "m", *argv), env)
        started.append(engine)
        return engine.wait_until_it_listens() if listens else engine

    yield start
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineUnderTest]:
    """A fast engine for tests that leave it as they found it."""
    running = EngineUnderTest(("--served-model-name", "m", "--speed", "20"), {}).wait_until_it_listens()
    yield running
    assert running.stop() == 0
