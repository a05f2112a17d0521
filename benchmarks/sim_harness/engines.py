"""Simulated engines as processes, and a small client that times their answers."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

STOP_DEADLINE_S = 20.0


class Engine:
    """One engine of the given profile. Context manager; connections are kept and used again."""

    def __init__(self, profile: str) -> None:
        argv = (sys.executable, "-m", "hetero_llm_sim.engine", "--served-model-name", "m", "--profile", profile)
        self.child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.process = psutil.Process(self.child.pid)
        self.port = self._listening_port()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        for _, writer in self._idle:
            writer.close()
        self.child.terminate()
        self.child.communicate(timeout=STOP_DEADLINE_S)

    def cpu_s(self) -> float:
        """Return user and system time of the process so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[float, bytes]:
        """Return (seconds to the first byte, the whole answer)."""
        reader, writer = await self._connection()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        began_s = time.perf_counter()
        writer.write(head + body)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        first_s = time.perf_counter() - began_s
        if not answer_head.startswith(b"HTTP/1.1 200 "):
            raise RuntimeError(f"the engine refused a request: {answer_head!r}")
        if found := re.search(rb"content-length: (\d+)", answer_head):
            answer = await reader.readexactly(int(found[1]))
        else:
            answer = await reader.readuntil(b"0\r\n\r\n")
        self._idle.append((reader, writer))
        return first_s, answer

    async def token_times(self, prompt: Sequence[int], max_tokens: int) -> list[float]:
        """Return when each token came, in seconds from the request."""
        reader, writer = await self._connection()
        body = json.dumps({"prompt": list(prompt), "max_tokens": max_tokens, "stream": True}).encode()
        times: list[float] = []
        began_s = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        while len(times) < max_tokens:
            if (await reader.readuntil(b"\n")).startswith(b"data: "):
                times.append(time.perf_counter() - began_s)
        await reader.readuntil(b"0\r\n\r\n")
        self._idle.append((reader, writer))
        return times

    async def lateness(self) -> dict[float, int]:
        """Return how many events so far were at most so many seconds late, by upper bound."""
        page = (await self.ask("GET", "/metrics"))[1].decode()
        found = re.findall(r'sim:event_lateness_seconds_bucket{le="([^"]+)"[^}]*} (\d+)', page)
        return {float(bound): int(count) for bound, count in found}

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self._idle.pop() if self._idle else await asyncio.open_connection("127.0.0.1", self.port)

    def _listening_port(self) -> int:
        assert self.child.stderr is not None
        said = []
        for line in self.child.stderr:
            said.append(line)
            if "listening on" in line:
                return int(line.rpartition(":")[2])
        self.child.wait(STOP_DEADLINE_S)
        raise RuntimeError(f"the engine ended before it listened: {''.join(said)}")


async def lateness_of(engines: Sequence[Engine]) -> dict[float, int]:
    """Return the sum of `Engine.lateness` over `engines`."""
    total: dict[float, int] = {}
    for engine in engines:
        for bound_s, count in (await engine.lateness()).items():
            total[bound_s] = total.get(bound_s, 0) + count
    return total


def since(before: Mapping[float, int], now: Mapping[float, int]) -> dict[float, int]:
    """Return the events between two readings of `lateness_of`."""
    return {bound_s: count - before[bound_s] for bound_s, count in now.items()}
