"""A place of its own for one benchmark: state, leases, temporary files, and the end of everything started in it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from types import TracebackType

import psutil

MARK = "HETERO_BENCHMARK_MARK"
"""Every process started in a workplace inherits it, engines and Ray's own included."""

CACHE = "HETERO_LLM_CACHE_DIR"
"""The one setting of the caller that is kept: converting the demo model is not what is measured."""

STOP_DEADLINE_S = 60.0


class Workplace:
    """Context manager. Settings of the caller (``HETERO_LLM_*``, ``RAY_*``) do not reach what is measured in it.

    Attributes:
        root: folder of everything written; removed at the end.
        env: environment for processes started in it.
    """

    def __init__(self) -> None:
        # Short: Ray and vLLM put Unix sockets under it, whose paths are limited to 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="hb-", dir="/tmp"))
        (self.root / "t").mkdir()
        self._mark = uuid.uuid4().hex
        kept = {k: v for k, v in os.environ.items() if k == CACHE or not k.startswith(("HETERO_LLM_", "RAY_"))}
        self.env = {
            **kept,
            "HETERO_LLM_STATE_DIR": str(self.root / "state"),
            "HETERO_LLM_LEASE_DIR": str(self.root / "lease"),
            "TMPDIR": str(self.root / "t"),
            "NO_COLOR": "1",
            MARK: self._mark,
        }

    def __enter__(self) -> Workplace:
        # SIGTERM would end Python without a word; as an exception it cleans up like Ctrl-C.
        self._on_sigterm = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.signal(signal.SIGTERM, self._on_sigterm)
        for process in self.processes():
            process.kill()
        shutil.rmtree(self.root, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes that were started here, directly or not."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


def stop(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process that leads its own session, wait for its end, kill it if that takes too long."""
    if process.poll() is None:
        os.killpg(process.pid, number)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
