"""The engine keeps its profile's time exactly. Nothing here sleeps: the clock is an argument."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hetero_llm_sim.profile import Profile, load_profiles
from hetero_llm_sim.scheduler import QueueFull, Scheduler, Sequence
from hetero_llm_sim.tokens import Greedy, continuation
from hypothesis import given, settings
from hypothesis import strategies as st

PROFILE = Profile(
    prefill_tokens_per_s=1000,
    base_s=0.020,
    slope_s=0.001,
    max_batch=16,
    max_batched_tokens=512,
    kv_tokens=16 * 1024,
    block_tokens=16,
    max_queued=32,
    memory_bytes=1,
)


class Run:
    """A scheduler and everything it has emitted, by request."""

    def __init__(self, profile=PROFILE, **options):
        self.scheduler = Scheduler(profile, **options)
        self.now_s = 0.0
        self.times: dict[str, list[float]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.sequences: dict[str, Sequence] = {}

    def add(self, name, prompt, max_tokens=1, priority=0):
        sequence = Sequence(list(prompt), max_tokens, Greedy(prompt), name, priority)
        self.until(self.now_s)
        self.scheduler.add(sequence, self.now_s)
        self.sequences[name], self.times[name], self.tokens[name] = sequence, [], []
        return sequence

    def until(self, now_s):
        self.now_s = now_s
        for step in self.scheduler.advance(now_s):
            for sequence, _, token in step.emitted:
                self.times[sequence.owner].append(step.ends_s)
                self.tokens[sequence.owner].append(token)

    def to_the_end(self):
        while (next_s := self.scheduler.next_s) is not None:
            self.until(next_s)

    def gaps(self, name):
        times = self.times[name]
        return [later - earlier for earlier, later in pairwise(times)]


def prompt(number, length=32):
    return [number * 1000 + place for place in range(length)]


# -- time --------------------------------------------------------------------------------------------------------------


def test_the_first_token_comes_when_the_prompt_is_computed():
    run = Run()
    run.add("a", prompt(1, 400))
    run.to_the_end()
    assert run.times["a"] == [pytest.approx(0.4)]


@pytest.mark.parametrize("name", ["fast", "mid", "slow"])
@pytest.mark.parametrize("share", [0, 8, 1])
def test_tokens_of_a_full_batch_are_as_far_apart_as_the_profile_says(name, share):
    profile = load_profiles("").find(name)
    batch = {0: 1, 8: 8, 1: profile.max_batch}[share]
    run = Run(profile)
    for number in range(batch):
        run.add(str(number), prompt(number, 16), max_tokens=300)
    run.to_the_end()
    # By then all prompts are computed and nobody has finished.
    steady = [gap for number in range(batch) for gap in run.gaps(str(number))[150:160]]
    assert steady == [pytest.approx(profile.base_s + profile.slope_s * batch)] * len(steady)


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_prompts_longer_than_a_step_are_computed_one_after_the_other_at_the_profiles_rate(batch):
    run = Run(replace(PROFILE, base_s=0, slope_s=1e-9, max_batched_tokens=16))
    for number in range(batch):
        run.add(str(number), prompt(number, 96))
    run.to_the_end()
    expected = [pytest.approx(0.096 * (number + 1), rel=0.001) for number in range(batch)]
    assert [run.times[str(number)][0] for number in range(batch)] == expected


@pytest.mark.parametrize("batch", [1, 8, 16])
def test_prompts_that_fit_one_step_get_their_first_tokens_together(batch):
    run = Run()
    for number in range(batch + 1):
        run.add(str(number), prompt(number, 32))
    run.to_the_end()
    # The first was alone when it came; all others shared the step after it.
    firsts = [run.times[str(number)][0] for number in range(1, batch + 1)]
    assert firsts == [pytest.approx(0.032 * (1 + batch))] * batch


def test_a_long_prompt_is_computed_in_chunks_that_slow_the_decoding_ones_down():
    run = Run()
    run.add("decoding", prompt(1, 16), max_tokens=20)
    run.until(0.1)
    run.add("long", prompt(2, 1500))
    run.to_the_end()
    stalled = [gap for gap in run.gaps("decoding") if gap > 0.03]
    # 512 tokens a step, one of which is the decoding sequence's.
    assert stalled == [pytest.approx(0.021 + 0.511), pytest.approx(0.021 + 0.511), pytest.approx(0.021 + 0.478)]


def test_steps_missed_by_a_late_caller_have_their_own_times():
    on_time, late = Run(), Run()
    for run in (on_time, late):
        run.add("a", prompt(1), max_tokens=50)
    on_time.to_the_end()
    late.until(100.0)
    assert late.times == on_time.times


def test_a_slowed_engine_takes_that_many_times_as_long():
    run = Run()
    run.scheduler.slowdown = 4
    run.add("a", prompt(1, 100), max_tokens=3)
    run.to_the_end()
    assert run.times["a"][0] == pytest.approx(0.4)
    assert run.gaps("a") == [pytest.approx(4 * 0.021)] * 2


def test_a_group_of_two_is_twice_as_fast_with_tensor_parallelism():
    alone, group = PROFILE.of_group(1, 1), PROFILE.of_group(2, 1)
    assert group.prefill_tokens_per_s == 2 * alone.prefill_tokens_per_s
    assert group.base_s == alone.base_s / 2
    assert group.kv_tokens == 2 * alone.kv_tokens


def test_stages_of_a_pipeline_do_not_shorten_a_tokens_time():
    assert PROFILE.of_group(1, 2).base_s == PROFILE.base_s


# -- the batch and the queue -------------------------------------------------------------------------------------------


def test_never_more_than_the_batch_runs():
    run = Run(replace(PROFILE, max_batch=4))
    for number in range(10):
        run.add(str(number), prompt(number), max_tokens=5)
        assert len(run.scheduler.running) <= 4
    while (next_s := run.scheduler.next_s) is not None:
        run.until(next_s)
        assert len(run.scheduler.running) <= 4
    assert all(len(times) == 5 for times in run.times.values())


def test_a_request_joins_the_batch_at_the_next_step():
    run = Run()
    run.add("a", prompt(1), max_tokens=10)
    run.until(0.035)
    run.add("b", prompt(2), max_tokens=1)
    run.to_the_end()
    # a's second step ends at 0.053; the next one decodes a and computes b's 32 tokens.
    assert run.times["b"] == [pytest.approx(0.053 + 0.021 + 0.032)]


def test_one_request_more_than_may_wait_is_refused():
    run = Run(replace(PROFILE, max_batch=1, max_queued=2))
    run.add("running", prompt(0))
    run.add("first", prompt(1))
    run.add("second", prompt(2))
    with pytest.raises(QueueFull, match="2 requests wait"):
        run.add("third", prompt(3))
    assert run.scheduler.waiting == 2


def test_with_no_queue_at_all_a_free_engine_still_takes_a_request():
    run = Run(replace(PROFILE, max_batch=1, max_queued=0))
    run.add("a", prompt(1))
    with pytest.raises(QueueFull):
        run.add("b", prompt(2))


def test_lower_priority_numbers_go_first():
    run = Run(replace(PROFILE, max_batch=1))
    run.add("running", prompt(0))
    run.add("batch", prompt(1), priority=10)
    run.add("interactive", prompt(2), priority=-10)
    run.add("normal", prompt(3))
    run.to_the_end()
    order = sorted(run.times, key=lambda name: run.times[name])
    assert order == ["running", "interactive", "normal", "batch"]


def test_equals_go_in_order_of_arrival():
    run = Run(replace(PROFILE, max_batch=1))
    for name in "abcd":
        run.add(name, prompt(ord(name)))
    run.to_the_end()
    assert sorted(run.times, key=lambda name: run.times[name]) == list("abcd")


def test_an_aborted_request_gets_no_token_and_its_blocks_are_free_at_once():
    run = Run()
    sequence = run.add("a", prompt(1, 200), max_tokens=100)
    run.until(0.3)
    before = len(run.times["a"])
    run.scheduler.abort(sequence)
    assert run.scheduler.kv.usage == 0
    run.to_the_end()
    assert len(run.times["a"]) == before
    assert run.scheduler.running == []


def test_a_waiting_request_can_be_aborted():
    run = Run(replace(PROFILE, max_batch=1))
    run.add("a", prompt(1), max_tokens=2)
    waiting = run.add("b", prompt(2))
    run.add("c", prompt(3))
    run.scheduler.abort(waiting)
    assert run.scheduler.waiting == 1
    run.to_the_end()
    assert run.times["b"] == []
    assert len(run.times["c"]) == 1


def test_an_abort_frees_the_engine_within_one_step():
    run = Run()
    sequence = run.add("a", prompt(1, 100), max_tokens=1000)
    run.until(0.1)
    run.scheduler.abort(sequence)
    run.until(0.1 + 0.021)
    assert run.scheduler.next_s is None


# -- the prefix cache --------------------------------------------------------------------------------------------------


def test_a_prompt_seen_before_costs_only_its_last_block():
    run = Run()
    run.add("first", prompt(1, 320))
    run.to_the_end()
    run.add("again", prompt(1, 320))
    began = run.now_s
    run.to_the_end()
    assert run.sequences["again"].cached_tokens == 304
    assert run.times["again"][0] - began == pytest.approx(0.016)


def test_hits_and_queries_are_counted_in_tokens():
    run = Run()
    run.add("first", prompt(1, 100))
    run.to_the_end()
    run.add("longer", [*prompt(1, 100), *prompt(2, 60)])
    run.to_the_end()
    counters = run.scheduler.counters
    assert (counters.prefix_queried_tokens, counters.prefix_hit_tokens) == (260, 96)


def test_an_answer_is_cached_for_the_next_turn():
    run = Run()
    run.add("turn", prompt(1, 16), max_tokens=33)
    run.to_the_end()
    run.add("next", [*prompt(1, 16), *run.tokens["turn"], 5, 6, 7])
    run.to_the_end()
    # 16 + 33 tokens, of which the last was never computed: three full blocks.
    assert run.sequences["next"].cached_tokens == 48


def test_what_is_evicted_is_not_counted_as_a_hit():
    run = Run(replace(PROFILE, kv_tokens=320))
    run.add("old", prompt(1, 160))
    run.to_the_end()
    run.add("new", prompt(2, 300))
    run.to_the_end()
    run.add("old again", prompt(1, 160))
    run.to_the_end()
    assert run.sequences["old again"].cached_tokens < 160 - 16


# -- when the KV cache is full -----------------------------------------------------------------------------------------


def test_a_request_waits_until_there_is_room_for_its_prompt():
    run = Run(replace(PROFILE, kv_tokens=160))
    run.add("a", prompt(1, 140), max_tokens=4)
    run.add("b", prompt(2, 100))
    run.until(0.15)
    assert (len(run.scheduler.running), run.scheduler.waiting) == (1, 1)
    run.to_the_end()
    assert len(run.times["b"]) == 1


def test_the_last_of_the_lowest_class_gives_way_and_still_answers_the_same():
    run = Run(replace(PROFILE, kv_tokens=128), prefix_caching=False)
    run.add("a", prompt(1), max_tokens=60)
    run.add("b", prompt(2), max_tokens=60)
    run.to_the_end()
    assert run.scheduler.counters.preemptions > 0
    assert run.times["a"][-1] < run.times["b"][-1]
    assert run.tokens["b"] == continuation(prompt(2), 60)


REQUESTS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 40), st.integers(-1, 1), st.floats(0, 0.5)),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(REQUESTS, st.booleans(), st.integers(0, 7))
def test_every_request_gets_exactly_its_tokens_and_everything_is_given_back(requests, caching, abort_each):
    run = Run(replace(PROFILE, kv_tokens=160, max_batch=4), prefix_caching=caching)
    aborted = set()
    for number, (who, length, max_tokens, priority, gap_s) in enumerate(requests):
        run.until(run.now_s + gap_s)
        sequence = run.add(number, prompt(who, length), max_tokens, priority)
        if abort_each and number % abort_each == abort_each - 1:
            run.until(run.now_s + gap_s / 2)
            run.scheduler.abort(sequence)
            aborted.add(number)
    run.to_the_end()
    for number, (who, length, max_tokens, _, _) in enumerate(requests):
        expected = continuation(prompt(who, length), max_tokens)
        got = run.tokens[number]
        assert got == expected[: len(got)] if number in aborted else got == expected
    assert (run.scheduler.running, run.scheduler.waiting) == ([], 0)
    assert run.scheduler.kv.free_blocks == 10
