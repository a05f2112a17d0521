"""What a client measures against the profile: time to first token and time between tokens, by batch."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Awaitable, Callable

from hetero_llm_sim.profile import Profile, load_profiles

from benchmarks.sim_harness.engines import Engine, lateness_of, since
from benchmarks.sim_harness.verdict import Compared, late_quantile_s

PROMPT_TOKENS = 2000
GENERATED_TOKENS = 90
COUNTED = slice(10, 80)
"""Tokens of each answer whose distance counts: then all of the batch decode."""

REPEATS = 3
SEED = 2


async def compare(engine: Engine, profile_name: str) -> list[Compared]:
    """Return the rows: first token and time between tokens at batch 1, 8 and the profile's largest.

    A batch is as many requests at the same time. Its first-token time is that of the last of them: by then all prompts
    were computed and nothing else, however the engine put them into steps. Events of all rows are judged together: a
    row alone has too few of them for a 99th percentile.
    """
    profile, rng = load_profiles().find(profile_name), random.Random(SEED)
    batches = sorted({1, 8, profile.max_batch})
    late = await lateness_of([engine])
    rows = [await _first_tokens(engine, profile, batch, rng) for batch in batches]
    rows += [await _between_tokens(engine, profile, batch) for batch in batches]
    late_s = late_quantile_s(since(late, await lateness_of([engine])), 0.99)
    return [
        Compared(name=name, measured_s=measured_s, profile_s=profile_s, late_s=late_s)
        for name, measured_s, profile_s in rows
    ]


async def _first_tokens(engine: Engine, profile: Profile, batch: int, rng: random.Random) -> tuple[str, float, float]:
    async def last_first_s() -> float:
        # Random, so that no prompt begins as another did: the prefix cache would make it cost nothing.
        prompts = [[rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(batch)]
        times = await asyncio.gather(*(engine.token_times(prompt, 1) for prompt in prompts))
        return max(answer[0] for answer in times)

    measured_s = await _median(last_first_s, REPEATS if batch == 1 else 1)
    return f"TTFT, batch {batch}", measured_s, batch * PROMPT_TOKENS / profile.prefill_tokens_per_s


async def _between_tokens(engine: Engine, profile: Profile, batch: int) -> tuple[str, float, float]:
    streams = [engine.token_times([batch, number], GENERATED_TOKENS) for number in range(batch)]
    times = await asyncio.gather(*streams)
    gaps = COUNTED.stop - COUNTED.start
    measured_s = statistics.fmean((answer[COUNTED.stop] - answer[COUNTED.start]) / gaps for answer in times)
    return f"inter-token, batch {batch}", measured_s, profile.base_s + profile.slope_s * batch


async def _median(measure: Callable[[], Awaitable[float]], repeats: int) -> float:
    return statistics.median([await measure() for _ in range(repeats)])
