"""``hetero-llm serve`` as a user starts it, with the moments of its start noted from outside."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import clock
from benchmarks.workplace import Workplace, stop
from hetero_llm.cluster.state import ServeRecord

READY_DEADLINE_S = 600.0
_POLL_S = 0.05


class Void(Exception):
    """The run cannot be used: something failed that the benchmark did not mean to measure."""


class Served:
    """A running `serve` of the demo model, or of another one.

    Attributes:
        process: the supervising process.
        started_s: when the command was started; all times on `benchmarks.clock`.
        ready_s: when the Ready block was complete on its output.
        gateway_s: when the gateway was seen to listen, to `_POLL_S`.
        said: lines of its stderr with the time they came.
    """

    def __init__(self, workplace: Workplace, args: Sequence[str] = ()):
        self._workplace = workplace
        self.said: list[tuple[float, str]] = []
        self.ready_s = self.gateway_s = 0.0
        self._answer: dict[str, Any] = {}
        self._answered = threading.Event()
        argv = [sys.executable, "-m", "hetero_llm.cli", "serve", *args, "--port", "0", "-o", "json"]
        self.started_s = clock.now_s()
        # A session of its own, so that `close` can do what Ctrl-C in a terminal does: signal the whole group.
        self.process = subprocess.Popen(
            argv,
            env=workplace.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for target in (self._read_answer, self._read_talk):
            threading.Thread(target=target, daemon=True).start()

    def wait_ready(self) -> None:
        """Return when the Ready block was printed.

        Raises:
            Void: it ended instead, or took more than `READY_DEADLINE_S`.
        """
        while not self._answered.wait(_POLL_S):
            if self.gateway_s == 0.0 and self._record_has_url():
                self.gateway_s = clock.now_s()
            late = clock.now_s() - self.started_s > READY_DEADLINE_S
            if late or self.process.poll() is not None:
                talk = "\n".join(text for _, text in self.said)
                raise Void(f"serve is not ready, exit status {self.process.poll()}:\n{talk}")
        self.gateway_s = self.gateway_s or self.ready_s

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return str(self._answer["url"])

    def status(self) -> dict[str, Any]:
        """Return what the gateway says of itself and of the replicas."""
        with urllib.request.urlopen(f"{self.url}/status", timeout=10.0) as answer:
            data: dict[str, Any] = json.load(answer)["data"]
        return data

    def replica(self) -> dict[str, Any]:
        """Return the status of the one replica.

        Raises:
            Void: there is not exactly one.
        """
        replicas: list[dict[str, Any]] = self.status()["replicas"]
        if len(replicas) != 1:
            raise Void(f"the benchmark needs one replica, there are {len(replicas)}")
        return replicas[0]

    def close(self) -> None:
        """Do what Ctrl-C does."""
        stop(self.process, signal.SIGINT)

    def _record_has_url(self) -> bool:
        folder = Path(self._workplace.env["HETERO_LLM_STATE_DIR"]) / "serve"
        return any(_url_of(path) for path in folder.glob("*.json"))

    def _read_answer(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(b"{"):
                self.ready_s = clock.now_s()
                self._answer = json.loads(line).get("data", {})
                self._answered.set()

    def _read_talk(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((clock.now_s(), line.decode("utf-8", "replace").rstrip()))


def _url_of(path: Path) -> str | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ServeRecord).url
    except FileNotFoundError:
        return None
