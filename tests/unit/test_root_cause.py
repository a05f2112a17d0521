"""The root cause is found in real logs of failed starts, and by the general rules when no pattern fits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hetero_llm_cpu.log import FACTS, PHASES, ROOT_CAUSES

from hetero_llm.plugin import RootCausePattern
from hetero_llm.plugin.rootcause import find_root_cause

DEAD_CORE = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s):"
SAMPLES = Path(__file__).parents[1] / "samples" / "vllm-cpu"

CAUSES = {
    "head-size-16": "the CPU kernels have no attention for head size 16",
    "bad-flag": "the engine does not know the flag --no-such-flag",
    "bad-value": "the engine refuses the value of --dtype: invalid choice: 'float99'",
    "no-weights": "no model weights in /models/noweights",
    "no-config": "/models/nocfg is not a model folder: it has no config.json",
    "kv-too-large": "the KV cache needs 2500.0 GiB, NUMA node 0 has 7.81 of 9.71 GiB free",
    "context-over-kv": "the KV cache given is too small for a single block",
    "context-needs-more-kv": "one request of 2048 tokens needs",
    "context-over-model": "a context of 99999 tokens was asked for, the model was made for 2048",
    "unknown-architecture": "this vLLM does not support the architecture 'Foo3ForCausalLM'",
    "unknown-model-type": "this engine does not know the model type 'foo3'",
    "corrupt-truncated": "a .safetensors file of the model is damaged: Error while deserializing header",
    "corrupt-header": "a .safetensors file of the model is damaged: its header cannot be read",
    "bind-too-few": "the cores given to the ranks, ['0'], are not one list for each of 2",
    "bind-auto": "2 ranks cannot be bound to cores by themselves on this machine",
    "tp-heads": "4 attention heads cannot be split over 3 ranks",
    "port-in-use": "the engine's port belongs to another process",
    "memory-limit": "out of memory: 5999951872 bytes could not be had",
    "no-libnuma": "vLLM's compiled kernels could not be loaded: init_cpu_memory_env is missing",
    "worker-killed": "the engine's worker VllmWorker-0 was killed, most likely because memory ran out",
    "core-killed": "the engine core ended without saying why, most likely because memory ran out",
}

FIRST_EXCEPTIONS = {
    "head-size-16": "RuntimeError: Unsupported CPU attention configuration: head_dim=16",
    "bad-flag": "unrecognized arguments: --no-such-flag",
    "no-weights": "RuntimeError: Cannot find any model weights with `/models/noweights`",
    "kv-too-large": "ValueError: Available memory on node 0 (7.81/9.71 GiB) on kv cache allocation",
    "context-over-model": "ValidationError: ModelConfig: User-specified max_model_len (99999) is greater",
    "corrupt-truncated": "SafetensorError: Error while deserializing header",
    "corrupt-header": "MemoryError: metadata = json.loads(",
    "bind-too-few": "AssertionError: Given number of CPU id list ['0'] doesn't match local world size 2.",
    "port-in-use": "OSError: [Errno 98] Address already in use",
}


def lines(name: str) -> list[str]:
    return (SAMPLES / f"{name}.log").read_text().splitlines(keepends=True)


def pattern(regex: str, message: str, *, generic: bool = False) -> RootCausePattern:
    return RootCausePattern(pattern=re.compile(regex), message=message, generic=generic)


def message(log: list[str], patterns: Sequence[RootCausePattern]) -> str:
    cause = find_root_cause(log, patterns)
    assert cause is not None
    return cause.message


def first_message(log: list[str]) -> str:
    return message(log, ())


def test_every_sample_has_an_expected_cause() -> None:
    assert sorted(path.stem for path in SAMPLES.glob("*.log")) == sorted(CAUSES)


@pytest.mark.parametrize(("sample", "expected"), CAUSES.items())
def test_the_cpu_patterns_name_the_cause_and_a_way_out(sample: str, expected: str) -> None:
    cause = find_root_cause(lines(sample), ROOT_CAUSES)
    assert cause is not None
    assert cause.message.startswith(expected)
    assert cause.next
    assert "{" not in "".join(cause.next)


@pytest.mark.parametrize(("sample", "expected"), FIRST_EXCEPTIONS.items())
def test_without_patterns_the_first_exception_is_the_cause(sample: str, expected: str) -> None:
    cause = find_root_cause(lines(sample), ())
    assert cause is not None
    assert cause.message.startswith(expected)


@pytest.mark.parametrize("sample", CAUSES)
def test_a_summary_is_never_the_cause_of_a_real_failure(sample: str) -> None:
    for patterns in (ROOT_CAUSES, ()):
        cause = find_root_cause(lines(sample), patterns)
        assert cause is not None
        assert "root cause" not in cause.message.lower()
        assert "stack trace" not in cause.message.lower()


def test_a_log_of_a_good_start_has_no_cause() -> None:
    good = [line for line in lines("head-size-16") if "ERROR" not in line]
    end = next(i for i, line in enumerate(good) if "Application startup complete" in line)
    assert find_root_cause(good[: end + 1], ROOT_CAUSES) is None


def test_the_phases_appear_in_order_in_a_real_start() -> None:
    log = lines("head-size-16")
    places = [next(i for i, line in enumerate(log) if marker.pattern.search(line)) for marker in PHASES]
    assert places == sorted(places)


def test_the_kv_cache_size_is_read_as_a_fact() -> None:
    found = [m for line in lines("head-size-16") for fact in FACTS if (m := fact.pattern.search(line))]
    assert [int(match[1].replace(",", "")) for match in found] == [1048576]


def test_a_line_logged_as_warning_is_no_cause() -> None:
    log = ["(APIServer pid=1) WARNING 12-01 04:34:03 [x.py:1] OSError: [Errno 98] Address already in use"]
    assert find_root_cause(log, ROOT_CAUSES) is None


def test_the_first_specific_hit_wins_over_later_ones() -> None:
    log = ["ValueError: one", "ValueError: two"]
    patterns = [pattern("two", "second"), pattern("one", "first")]
    assert message(log, patterns) == "first"


def test_a_generic_pattern_is_kept_only_when_no_exception_is_found() -> None:
    summary = [pattern("died", "something died", generic=True)]
    traceback = ["Traceback (most recent call last):", '  File "a.py", line 1, in f', "ValueError: real"]
    assert message(["core died"], summary) == "something died"
    assert message(["core died", *traceback], summary) == "ValueError: real"


def test_a_worker_counts_before_the_server_that_failed_first() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "server.py", line 1, in f',
        "ConnectionError: worker gone",
        "(Worker pid=7) ERROR 12-01 04:35:24 [w.py:1] Traceback (most recent call last):",
        '(Worker pid=7) ERROR 12-01 04:35:24 [w.py:1]   File "w.py", line 1, in f',
        "(Worker pid=7) ERROR 12-01 04:35:24 [w.py:1] ValueError: bad weights",
    ]
    assert first_message(log) == "ValueError: bad weights"


def test_tracebacks_of_two_processes_that_write_at_once_are_kept_apart() -> None:
    worker, core = "(Worker pid=7) ERROR 12-01 04:35:24 [w.py:1] ", "(EngineCore pid=5) ERROR 12-01 04:35:24 [c.py:2] "
    log = [
        f"{worker}Traceback (most recent call last):",
        f"{core}Traceback (most recent call last):",
        f'{worker}  File "w.py", line 1, in f',
        f'{core}  File "c.py", line 1, in f',
        f"{core}RuntimeError: Worker failed, check the stack trace above for the root cause",
        f"{worker}ValueError: bad weights",
    ]
    assert first_message(log) == "ValueError: bad weights"


def test_an_exception_without_text_shows_the_line_it_stands_on() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "/opt/venv/lib/python3.11/site-packages/vllm/x.py", line 12, in f',
        "    assert heads % ranks == 0",
        "           ^^^^^^^^^^^^^^^^^^",
        "AssertionError",
    ]
    assert first_message(log) == "AssertionError: assert heads % ranks == 0 (vllm/x.py:12)"


def test_an_interrupt_is_not_a_cause_beside_a_real_one() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "KeyboardInterrupt",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        "OSError: disk gone",
    ]
    assert first_message(log) == "OSError: disk gone"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes. "
         "Error code 12 (Cannot allocate memory)", "out of memory: 99 bytes could not be had"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "out of memory: std::bad_alloc"),
        (f"{DEAD_CORE} {{'EngineCore': -9}}",
         "EngineCore was killed, most likely because the machine ran out of memory"),
        (f"{DEAD_CORE} {{'EngineCore': -11}}",
         "EngineCore was ended by signal 11"),
        ("Fatal Python error: Segmentation fault", "the engine crashed: Segmentation fault"),
    ],
)  # fmt: skip
def test_deaths_without_an_exception_are_put_in_words(line: str, expected: str) -> None:
    assert message([line], ROOT_CAUSES) == expected


def test_colours_and_carriage_returns_do_not_hide_a_cause() -> None:
    log = ["\x1b[0;36m(Worker pid=7)\x1b[0m ERROR 12-01 04:35:24 [w.py:1] boom 5", "Loading: 0%\rboom 6"]
    assert message(log[:1], [pattern(r"^boom (\d)", "b{1}")]) == "b5"
    assert message(log[1:], [pattern(r"^boom (\d)", "b{1}")]) == "b6"


def test_a_message_is_one_line_of_bounded_length() -> None:
    cause = find_root_cause(["x" * 5000], [pattern("x+", "{0}")])
    assert cause is not None
    assert len(cause.message) == 500


def test_an_empty_log_has_no_cause() -> None:
    assert find_root_cause([], ROOT_CAUSES) is None
