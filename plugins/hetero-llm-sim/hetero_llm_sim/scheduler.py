"""Continuous batching as vLLM does it, in time that is given from outside.

The engine works in steps. A step takes one token from each sequence that decodes; what is left of its token budget goes
to prompts, in order, so a long prompt is computed in chunks and slows the decoding ones down meanwhile. How long a step
takes is the profile's formula. Steps follow each other at exact times whenever `advance` is called, so a late caller
makes tokens late but does not stretch the simulated time.

Pure: no clock, no I/O. Every method takes the time now, in seconds, which must not run backwards.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

from hetero_llm_sim.kv_cache import KvCache
from hetero_llm_sim.profile import Profile
from hetero_llm_sim.tokens import Greedy


class QueueFull(Exception):
    """The engine has as many waiting requests as it may have."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine.

    Attributes:
        tokens: the prompt, then what was generated.
        owner: whatever the caller wants to find again when tokens come.
        priority: lower goes first.
        computed: how many of `tokens` are in the KV cache.
        cached_tokens: prompt tokens found in the prefix cache at the first attempt; None until then.
        arrived_s: when it was added.
        gone: finished or aborted.
    """

    tokens: list[int]
    max_tokens: int
    greedy: Greedy
    owner: Any = None
    priority: int = 0
    prompt_length: int = field(init=False)
    computed: int = 0
    cached_tokens: int | None = None
    arrived_s: float = 0.0
    gone: bool = False
    order: tuple[int, int] = (0, 0)
    blocks: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.tokens)


@dataclass(slots=True)
class Step:
    """One step, under way or done.

    Attributes:
        ends_s: when its tokens are ready.
        emitted: (sequence, how many tokens it has had with this one, the token) of each sequence that got one. Later
            steps may be over already, so this is not to be read from the sequence.
    """

    ends_s: float
    work: dict[Sequence, int]
    emitted: list[tuple[Sequence, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Counters:
    """What has happened since the start; all only grow."""

    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0


class Scheduler:
    """The engine's mind: which sequence gets how many tokens in which step."""

    def __init__(self, profile: Profile, *, prefix_caching: bool = True) -> None:
        self.profile = profile
        self.slowdown = 1.0
        """Factor on the length of every step that is begun from now on."""
        blocks = profile.kv_tokens // profile.block_tokens
        self.kv = KvCache(blocks, profile.block_tokens, prefix_caching=prefix_caching)
        self.counters = Counters()
        self.running: list[Sequence] = []
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []
        self._waiting_count = 0
        self._arrivals = 0
        self._step: Step | None = None

    @property
    def waiting(self) -> int:
        """Number of requests that are not in the batch."""
        return self._waiting_count

    @property
    def next_s(self) -> float | None:
        """When the step under way ends; None when there is nothing to do."""
        return self._step.ends_s if self._step else None

    def add(self, sequence: Sequence, now_s: float) -> None:
        """Take a request. Call `advance` with the same time first.

        Raises:
            QueueFull: `max_queued` requests wait already.
        """
        if self._waiting_count >= self.profile.max_queued and not self._has_room():
            raise QueueFull(f"{self._waiting_count} requests wait already")
        self._arrivals += 1
        sequence.order, sequence.arrived_s = (sequence.priority, self._arrivals), now_s
        self._wait(sequence)
        if self._step is None:
            self._step = self._begin(now_s)

    def abort(self, sequence: Sequence) -> None:
        """Forget a request and free what it holds at once; the step under way keeps its length."""
        if sequence.gone:
            return
        sequence.gone = True
        if sequence in self.running:
            self.running.remove(sequence)
            self._free(sequence)
        else:
            self._waiting_count -= 1

    def advance(self, now_s: float) -> list[Step]:
        """Return the steps that ended by `now_s`, in order; each later one began when the one before ended."""
        done: list[Step] = []
        while self._step is not None and self._step.ends_s <= now_s:
            step = self._step
            self._finish(step)
            done.append(step)
            self._step = self._begin(step.ends_s)
        return done

    # -- a step begins -------------------------------------------------------------------------------------------------

    def _begin(self, now_s: float) -> Step | None:
        budget = self.profile.max_batched_tokens
        work: dict[Sequence, int] = {}
        preempted: set[Sequence] = set()
        for sequence in tuple(self.running):
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if count == 0 or sequence in preempted:
                continue
            while sequence not in preempted and not self._reserve(sequence, count):
                victim = max(self.running, key=_order)
                budget += work.pop(victim, 0)
                self._preempt(victim)
                preempted.add(victim)
            if sequence not in preempted:
                work[sequence] = count
                budget -= count
        if not preempted:
            self._admit(work, budget)
        return Step(now_s + self._duration_s(work), work) if work else None

    def _admit(self, work: dict[Sequence, int], budget: int) -> None:
        while budget > 0 and len(self.running) < self.profile.max_batch:
            sequence = self._first_waiting()
            if sequence is None:
                return
            self._find_prefix(sequence)
            count = min(len(sequence.tokens) - sequence.computed, budget)
            if not self._reserve(sequence, count):
                self._free(sequence)
                return
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            self.running.append(sequence)
            self._count_prefix(sequence)
            work[sequence] = count
            budget -= count

    def _duration_s(self, work: dict[Sequence, int]) -> float:
        prompt_tokens = decoding = 0
        for sequence, count in work.items():
            if sequence.computed >= sequence.prompt_length and count == 1:
                decoding += 1
            else:
                prompt_tokens += count
        profile = self.profile
        decode_s = profile.base_s + profile.slope_s * decoding if decoding else 0.0
        return (decode_s + prompt_tokens / profile.prefill_tokens_per_s) * self.slowdown

    def _reserve(self, sequence: Sequence, count: int) -> bool:
        """Give the sequence blocks for `count` more tokens; False when there are not enough."""
        missing = -(-(sequence.computed + count) // self.kv.block_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        blocks = self.kv.take(missing)
        if blocks is None:
            return False
        sequence.blocks += blocks
        return True

    def _find_prefix(self, sequence: Sequence) -> None:
        # The last token is computed in any case: the next one comes from it.
        self.kv.extend_hashes(sequence.hashes, sequence.tokens, len(sequence.tokens) - 1)
        sequence.blocks = self.kv.take_prefix(sequence.hashes[: (len(sequence.tokens) - 1) // self.kv.block_tokens])
        sequence.computed = len(sequence.blocks) * self.kv.block_tokens

    def _count_prefix(self, sequence: Sequence) -> None:
        self.counters.prefix_queried_tokens += len(sequence.tokens)
        self.counters.prefix_hit_tokens += sequence.computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            self.counters.prompt_tokens += sequence.prompt_length

    # -- a step ends ---------------------------------------------------------------------------------------------------

    def _finish(self, step: Step) -> None:
        self.counters.steps += 1
        ended = False
        for sequence, count in step.work.items():
            if sequence.gone:
                continue
            self._computed(sequence, count)
            if sequence.computed < len(sequence.tokens):
                continue
            token = sequence.greedy.next()
            sequence.tokens.append(token)
            count = len(sequence.tokens) - sequence.prompt_length
            step.emitted.append((sequence, count, token))
            if count >= sequence.max_tokens:
                sequence.gone = ended = True
                self._free(sequence)
        self.counters.generated_tokens += len(step.emitted)
        if ended:
            self.running = [sequence for sequence in self.running if not sequence.gone]

    def _computed(self, sequence: Sequence, count: int) -> None:
        size = self.kv.block_tokens
        before = sequence.computed // size
        sequence.computed += count
        after = sequence.computed // size
        if after > before:
            self.kv.extend_hashes(sequence.hashes, sequence.tokens, sequence.computed)
            for number in range(before, after):
                self.kv.remember(sequence.blocks[number], sequence.hashes[number])

    # -- the queue -----------------------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        return self._waiting_count == 0 and len(self.running) < self.profile.max_batch

    def _wait(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (sequence.order, sequence))
        self._waiting_count += 1

    def _first_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].gone:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        self._wait(sequence)
        self.counters.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        self.kv.give_back(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order
