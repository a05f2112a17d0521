"""What simulated engines cost: CPU of eight engines that together answer 200 requests a second, and how true they are.

    python benchmarks/sim_harness.py [--engines 8] [--rate 200] [--seconds 10] [--profile fast]

Open-loop Poisson arrivals, spread at random over the engines: first all whole, then half of them streamed, then all
streamed. CPU is user + system time of the engine processes only. A run whose events were later than 2 ms at the 99th
percentile says so and is void: then the machine, not the profile, made the times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import psutil
import uvloop
from hetero_llm_sim.profile import load_profiles

PROMPT_WORDS = 120
VOID_S = 0.002


class Engine:
    def __init__(self, profile: str) -> None:
        argv = (sys.executable, "-m", "hetero_llm_sim.engine", "--served-model-name", "m", "--profile", profile)
        self.child = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
        self.process = psutil.Process(self.child.pid)
        assert self.child.stderr is not None
        line = next(line for line in self.child.stderr if "listening on" in line)
        self.port = int(line.rpartition(":")[2])
        self.idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        for _, writer in self.idle:
            writer.close()
        self.child.terminate()
        self.child.communicate(timeout=20)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return self.idle.pop() if self.idle else await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[float, bytes]:
        """Return (seconds to the first byte, the whole answer)."""
        reader, writer = await self.connection()
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        began = time.perf_counter()
        writer.write(head + body)
        answer_head = await reader.readuntil(b"\r\n\r\n")
        first_s = time.perf_counter() - began
        assert answer_head.startswith(b"HTTP/1.1 200 "), answer_head
        if found := re.search(rb"content-length: (\d+)", answer_head):
            answer = await reader.readexactly(int(found[1]))
        else:
            answer = await reader.readuntil(b"0\r\n\r\n")
        self.idle.append((reader, writer))
        return first_s, answer

    async def lateness(self) -> dict[float, int]:
        """Return how many events so far were at most so many seconds late."""
        page = (await self.ask("GET", "/metrics"))[1].decode()
        found = re.findall(r'sim:event_lateness_seconds_bucket{le="([^"]+)"[^}]*} (\d+)', page)
        return {float(bound): int(count) for bound, count in found}


@dataclass
class Result:
    name: str
    requests: int = 0
    chunks: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    late: dict[float, int] = field(default_factory=dict)
    first_s: list[float] = field(default_factory=list)

    def late_quantile_s(self, share: float) -> float:
        """Return the smallest bound under which `share` of the events lie."""
        total = self.late[float("inf")]
        return next(bound for bound, count in sorted(self.late.items()) if count >= share * total)

    def line(self) -> str:
        late_s = self.late_quantile_s(0.99)
        first = sorted(self.first_s)
        ttft = f"{first[len(first) // 2] * 1e3:7.1f}" if first else "      -"
        return (
            f"{self.name:12} {self.requests / self.wall_s:7.0f} {self.chunks / self.wall_s:8.0f} "
            f"{self.cpu_s / self.wall_s * 100:8.1f} {self.cpu_s / self.requests * 1e6:10.0f} {ttft} "
            f"{late_s * 1e3:9.1f}  {'void' if late_s > VOID_S else 'ok'}"
        )


async def load(engines: list[Engine], args: argparse.Namespace, name: str, streamed: float) -> Result:
    result, rng, running = Result(name), random.Random(1), set()
    before = [await engine.lateness() for engine in engines]
    cpu_s, began = sum(engine.cpu_s() for engine in engines), time.perf_counter()
    due_s = 0.0
    while (due_s := due_s + rng.expovariate(args.rate)) < args.seconds:
        await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
        task = asyncio.ensure_future(one(rng.choice(engines), args, result, rng, streamed))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    result.wall_s = time.perf_counter() - began
    result.cpu_s = sum(engine.cpu_s() for engine in engines) - cpu_s
    for engine, earlier in zip(engines, before, strict=True):
        for bound, count in (await engine.lateness()).items():
            result.late[bound] = result.late.get(bound, 0) + count - earlier[bound]
    return result


async def one(engine: Engine, args: argparse.Namespace, result: Result, rng: random.Random, streamed: float) -> None:
    stream = rng.random() < streamed
    prompt = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(PROMPT_WORDS))
    body = json.dumps({"model": "m", "prompt": prompt, "max_tokens": args.tokens, "stream": stream}).encode()
    first_s, answer = await engine.ask("POST", "/v1/completions", body)
    result.requests += 1
    if stream:
        result.chunks += answer.count(b"data: ")
        result.first_s.append(first_s)


async def token_times(engine: Engine, prompt: list[int], max_tokens: int) -> list[float]:
    """Return when each token came, in seconds from the request."""
    reader, writer = await engine.connection()
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True}).encode()
    began, times = time.perf_counter(), []
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    while len(times) < max_tokens:
        if (await reader.readuntil(b"\n")).startswith(b"data: "):
            times.append(time.perf_counter() - began)
    await reader.readuntil(b"0\r\n\r\n")
    engine.idle.append((reader, writer))
    return times


async def physics(engine: Engine, name: str) -> None:
    """Compare what a client measures with the profile: time to the first token alone, inter-token time by batch."""
    profile = load_profiles().find(name)
    firsts = []
    for number in range(3):
        prompt = [number] + [random.randrange(256) for _ in range(1999)]
        firsts += await token_times(engine, prompt, 1)
    rows = [("TTFT, batch 1", sorted(firsts)[1], 2000 / profile.prefill_tokens_per_s)]
    for batch in (1, 8, profile.max_batch):
        streams = [token_times(engine, [batch, number], 90) for number in range(batch)]
        times = await asyncio.gather(*streams)
        # From token 10 to 80 of each: then all of them decode.
        gap_s = sum(stream[80] - stream[10] for stream in times) / 70 / batch
        rows.append((f"inter-token, batch {batch}", gap_s, profile.base_s + profile.slope_s * batch))
    for what, measured_s, expected_s in rows:
        difference = (measured_s / expected_s - 1) * 100
        sys.stdout.write(
            f"{what:24} {measured_s * 1e3:7.2f} ms, profile {expected_s * 1e3:7.2f} ms, {difference:+.1f} %\n"
        )


async def measure(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(args.profile)) for _ in range(args.engines)]
        sys.stdout.write(
            f"{args.engines} engines ({args.profile}), {args.rate:g} requests/s in all, {args.tokens} tokens each, "
            f"{args.seconds:g} s a row, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n"
            "              req/s chunks/s  CPU % of a core  µs/req TTFT p50 ms  late p99 ms\n"
        )
        for name, streamed in (("whole", 0.0), ("half streamed", 0.5), ("streamed", 1.0)):
            sys.stdout.write((await load(engines, args, name, streamed)).line() + "\n")
            sys.stdout.flush()
        await physics(engines[0], args.profile)
        rss = [engine.process.memory_info().rss for engine in engines]
        sys.stdout.write(f"resident memory {max(rss) / 2**20:.0f} MiB an engine\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--profile", default="fast")
    asyncio.Runner(loop_factory=uvloop.new_event_loop).run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
