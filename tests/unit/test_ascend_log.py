"""What an Ascend engine's log is turned into: HCCL's and the driver's codes in words, with the way out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hetero_llm_ascend import codes, log

from hetero_llm.plugin import vllm_log
from hetero_llm.plugin.rootcause import RootCause, find_root_cause

LOGS = Path(__file__).parents[1] / "samples" / "ascend" / "logs"
ENV = {
    "HCCL_IF_IP": "10.0.0.2",
    "HCCL_SOCKET_IFNAME": "eth{0}",
    "HCCL_IF_BASE_PORT": "60128",
    "ASCEND_RT_VISIBLE_DEVICES": "4,5",
    "VLLM_PLUGINS": "ascend",
}

EXPECTED = {
    "port-bound": "another process has its host port, or rank 0 is not reachable",
    "port-bound-new": "HCCL's host port is bound by another process EI0019",
    "rank-missing": "a rank of the group never came: it died before, started late, or cannot be reached EI0006",
    "bad-parameter": "HcclCommInitRootInfo: HCCL refused its parameters (code 1)",
    "other-hccl-code": "HcclAllReduce: HCCL failed with code 15",
    "nic-down": "the network port of an NPU is down EJ0002",
    "not-connected": "two ranks could not connect their devices EI0009",
    "rank-table": "HCCL was given a rank table, and it is not valid EI0004",
    "notify-timeout": "a collective was waited for in vain: a rank died or hangs EI0002",
    "helper-busy": "HCCL's helper on the device could not start",
    "hccl-versions": "the ranks run different versions of HCCL (EI0008)",
    "no-libraries": "libatb.so cannot be found: the environment of CANN and nnal is not set",
    "no-platform": "vLLM's Ascend plugin could not be loaded",
    "not-installed": "vllm is not installed in the node's Python",
    "out-of-memory": "device 0 is out of memory: 3.47 GiB more were wanted, 1.66 GiB of 60.97 GiB are free",
    "out-of-memory-runtime": "a device is out of memory outside of torch's pool",
    "memory-taken": "4.21 of 60.96 GiB are free on a device, a share of 0.9 (54.86 GiB) is wanted",
    "driver-not-loaded": "the driver is not loaded, this user may not use it",
    "device-taken": "the device is taken exclusively by another container (-8020)",
    "driver-refused": "the driver refused to open a device (drvRetCode=87)",
    "device-not-opened": "the device cannot be opened (error 507033)",
    "wrong-build": "this vllm-ascend was built for A2, the device is A3",
    "unknown-part": "vllm-ascend has no support for this part (torch_npu calls it number 104)",
    "unknown-vllm": "vllm-ascend cannot tell which vLLM this is: 0.1.dev1+gabc",
    "not-healthy": "the device reports that it is not healthy",
}


def cause_of(name: str) -> RootCause:
    found = find_root_cause((LOGS / f"{name}.log").read_text().splitlines(), log.root_causes(ENV))
    assert found is not None
    return found


def test_every_sample_is_expected_to_mean_something() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_a_log_says_what_was_wrong_and_what_to_do(name: str) -> None:
    found = cause_of(name)
    assert EXPECTED[name] in found.message
    assert found.next


@pytest.mark.parametrize("name", ["port-bound", "rank-missing", "bad-parameter", "other-hccl-code", "not-connected"])
def test_a_failure_of_the_group_shows_the_variables_that_decide_about_it(name: str) -> None:
    shown = "\n".join(cause_of(name).next)
    assert "HCCL_IF_IP=10.0.0.2 HCCL_SOCKET_IFNAME=eth{0} HCCL_IF_BASE_PORT=60128" in shown
    assert "ASCEND_RT_VISIBLE_DEVICES=4,5" in shown
    assert "VLLM_PLUGINS" not in shown


def test_missing_libraries_say_which_scripts_to_source() -> None:
    assert [step for step in cause_of("no-libraries").next if "set_env.sh" in step] == [
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        "source /usr/local/Ascend/nnal/atb/set_env.sh",
    ]


def test_a_permission_problem_names_the_group_to_join() -> None:
    assert any("HwHiAiUser" in step for step in cause_of("driver-not-loaded").next)


def test_the_first_real_error_wins_over_the_rank_that_waited_for_it() -> None:
    lines = [
        *(LOGS / "out-of-memory.log").read_text().splitlines(),
        *(LOGS / "rank-missing.log").read_text().splitlines(),
    ]
    found = find_root_cause(lines, log.root_causes(ENV))
    assert found is not None
    assert found.message.startswith("device 0 is out of memory")


def test_a_number_that_only_looks_like_a_code_is_no_cause() -> None:
    lines = ["using port 38005-8005-1 for 2026-8020"]
    assert find_root_cause(lines, log.ROOT_CAUSES) is None


def test_vllms_own_causes_are_known_too() -> None:
    assert log.ROOT_CAUSES[-len(vllm_log.ROOT_CAUSES) :] == vllm_log.ROOT_CAUSES
    assert (log.PHASES, log.FACTS) == (vllm_log.PHASES, vllm_log.FACTS)


@pytest.mark.parametrize(
    ("text", "code"),
    [("ret is -8005", -8005), ("(ret=-8020)", -8020), ("-8255", -8255), ("port 8005", None), ("", None)],
)
def test_codes_are_found_in_what_tools_print(text: str, code: int | None) -> None:
    assert codes.code_in(text) == code


def test_every_code_has_words_and_a_next_step() -> None:
    for code in (-8001, -8002, -8005, -8008, -8012, -8020, -8255, -99998, -4711):
        assert f"({code})" in codes.words(code)
        assert codes.steps(code)
