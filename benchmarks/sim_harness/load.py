"""Open-loop load: Poisson arrivals, spread at random over the engines."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.sim_harness.engines import Engine, lateness_of, since
from benchmarks.sim_harness.verdict import late_quantile_s

PROMPT_WORDS = 120
SEED = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is sent: `rate` requests per second for `seconds`, `tokens` generated each, a share of them streamed."""

    name: str
    rate: float
    seconds: float
    tokens: int
    streamed: float


@dataclass(slots=True)
class Result:
    """What one load came to.

    Attributes:
        chunks: events of streams.
        wall_s: until the last answer was there.
        cpu_s: user and system time of all engines.
        late_s: 99th percentile of the lateness of their events; None without any.
        first_s: times to the first byte of the streamed answers.
    """

    load: Load
    requests: int = 0
    chunks: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    late_s: float | None = None
    first_s: list[float] = field(default_factory=list)

    @property
    def first_p50_s(self) -> float | None:
        """Median time to the first byte of a streamed answer, None without any."""
        return statistics.median(self.first_s) if self.first_s else None


async def run(engines: Sequence[Engine], load: Load) -> Result:
    """Send `load` to the engines and wait for all answers."""
    result, rng, running = Result(load), random.Random(SEED), set()
    late = await lateness_of(engines)
    cpu_s, began_s, due_s = sum(engine.cpu_s() for engine in engines), time.perf_counter(), 0.0
    while (due_s := due_s + rng.expovariate(load.rate)) < load.seconds:
        await asyncio.sleep(max(0.0, began_s + due_s - time.perf_counter()))
        running.add(asyncio.ensure_future(_one(rng.choice(engines), result, rng)))
    await asyncio.gather(*running)
    result.wall_s = time.perf_counter() - began_s
    result.cpu_s = sum(engine.cpu_s() for engine in engines) - cpu_s
    result.late_s = late_quantile_s(since(late, await lateness_of(engines)), 0.99)
    return result


async def _one(engine: Engine, result: Result, rng: random.Random) -> None:
    stream = rng.random() < result.load.streamed
    prompt = " ".join(rng.choice(("alpha", "beta", "gamma", "delta")) for _ in range(PROMPT_WORDS))
    asked = {"model": "m", "prompt": prompt, "max_tokens": result.load.tokens, "stream": stream}
    first_s, answer = await engine.ask("POST", "/v1/completions", json.dumps(asked).encode())
    result.requests += 1
    if stream:
        result.chunks += answer.count(b"data: ")
        result.first_s.append(first_s)
