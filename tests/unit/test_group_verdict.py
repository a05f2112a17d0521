"""Which rank of a failed pre-flight is named, and what is said about it."""

import random

import pytest

from hetero_llm.cluster.group_verdict import Ending, RankOutcome, explains_itself, judge
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import Device, GroupSetup, GroupSpec, RankSpec

SETUP = GroupSetup(torch_backend="nccl", rank_env=({}, {}, {}))
NODES = ("a", "a", "b")
SPEC = GroupSpec(
    ranks=tuple(
        RankSpec(
            rank=n, node=node, address=f"10.0.0.{n}", device=Device(kind="k", accelerator="x", uid=f"u{n}", index=n)
        )
        for n, node in enumerate(NODES)
    ),
    tp=3,
    pp=1,
    master_address="10.0.0.0",
    master_port=29500,
)


def outcome(rank, ending=Ending.PASSED, cause=None, *, after_s=1.0, phase="all-reduce", **facts):
    return RankOutcome(
        rank=rank,
        node=NODES[rank],
        device=f"u{rank}",
        ended_after_s=after_s,
        ending=ending,
        phase=phase,
        cause=cause,
        **facts,
    )


def verdict(*outcomes):
    """Return the error's report; the same in whatever order the outcomes arrive."""
    reports = set()
    for seed in range(5):
        mixed = list(outcomes)
        random.Random(seed).shuffle(mixed)
        with pytest.raises(GroupPreflightFailed) as failed:
            judge(SETUP, SPEC, mixed)
        reports.add((failed.value.report.message, failed.value.report.next))
    assert len(reports) == 1
    return failed.value.report


def test_a_group_that_passed_has_the_speed_of_its_slowest_rank_and_the_time_of_its_last():
    passed = [outcome(n, after_s=2.0 + n, bandwidth_bytes_per_s=100.0 - n) for n in (2, 0, 1)]
    report = judge(SETUP, SPEC, passed)
    assert [rank.rank for rank in report.ranks] == [0, 1, 2]
    assert (report.bandwidth_bytes_per_s, report.seconds) == (98.0, 4.0)


def test_a_rank_nobody_heard_of_is_a_failure():
    report = verdict(outcome(0), outcome(1))
    assert report.message == "nothing was heard of rank 2 on b in the nccl pre-flight"


CLOSED = "RuntimeError: Read error [10.0.0.2]:5830: Connection reset by peer."
TIMED_OUT = "RuntimeError: Timed out waiting 25000ms for recv operation to complete"


@pytest.mark.parametrize("real", ["the all-reduce is wrong: 1 at place 0, not 2", "acme: link 3 is down", None])
@pytest.mark.parametrize("secondary", [CLOSED, TIMED_OUT])
def test_a_reason_of_its_own_goes_before_lost_peers_and_time_outs_however_late(real, secondary):
    report = verdict(
        outcome(0, Ending.FAILED, secondary, after_s=1.0),
        outcome(1, Ending.STOPPED, after_s=3.0),
        outcome(2, Ending.FAILED, real, after_s=2.0),
    )
    assert report.message.startswith("rank 2 on b (device u2) failed")
    assert report.cause == real


def test_of_two_ranks_with_reasons_the_earlier_is_named():
    report = verdict(
        outcome(0, Ending.FAILED, "later", after_s=2.0),
        outcome(1, Ending.DIED, exit_code=-11, after_s=1.0),
        outcome(2, Ending.STOPPED, after_s=2.0),
    )
    assert report.message.startswith("rank 1 on a (device u1) was killed by signal 11 in its phase all-reduce")


def test_a_lost_connection_goes_before_a_time_out():
    report = verdict(
        outcome(0, Ending.FAILED, TIMED_OUT, after_s=1.0),
        outcome(1, Ending.FAILED, CLOSED, after_s=2.0),
        outcome(2, Ending.OVERDUE, after_s=3.0),
    )
    assert report.message.startswith("rank 1 on a")
    assert report.cause.startswith(CLOSED)


def test_a_rank_that_could_not_connect_goes_before_the_one_that_waited_for_it():
    report = verdict(
        outcome(0, Ending.FAILED, "waited 25 s: rank 2 never came", after_s=25.0, phase="meeting"),
        outcome(1, Ending.FAILED, "waited 25 s: rank 2 never came", after_s=25.0, phase="meeting"),
        outcome(2, Ending.FAILED, "no connection to rank 0 at 10.0.0.0:1: No route", after_s=25.6, phase="meeting"),
    )
    assert report.message.startswith("rank 2 on b")
    assert report.next[0] == "check that 10.0.0.2 reaches 10.0.0.0:29500 and the other ranks"


def test_when_all_only_waited_the_one_that_had_come_least_far_is_named():
    report = verdict(
        outcome(0, Ending.FAILED, "waited 25 s: rank 2 never came", after_s=25.0, phase="meeting"),
        outcome(1, Ending.FAILED, "waited 25 s: rank 2 never came", after_s=25.0, phase="meeting"),
        outcome(2, Ending.STOPPED, "a warning of no interest", after_s=27.0, phase="device"),
    )
    assert report.message.startswith("rank 2 on b (device u2) was stopped in its phase device after 27 s")
    assert "rank 0 on a failed in its phase meeting (waited 25 s: rank 2 never came)" in report.cause
    assert "no interest" not in report.cause


def test_a_message_names_interface_and_versions():
    report = verdict(
        outcome(0),
        outcome(1, Ending.FAILED, "no", interfaces=("eth0", "ib0"), versions={"torch": "2.10.0", "nccl": "2.27.5"}),
        outcome(2),
    )
    assert report.message == (
        "rank 1 on a (device u1; interface eth0, ib0; torch 2.10.0; nccl 2.27.5) failed in its phase all-reduce "
        "in the nccl pre-flight"
    )


def test_different_versions_among_the_ranks_are_pointed_out():
    report = verdict(
        outcome(0, versions={"nccl": "2.27.5", "torch": "2.10.0"}),
        outcome(1, versions={"nccl": "2.27.5", "torch": "2.10.0"}),
        outcome(2, Ending.FAILED, "no", versions={"nccl": "2.21.5", "torch": "2.10.0"}),
    )
    assert report.next == ("install one version of nccl: 2.27.5 on a, 2.21.5 on b", "hetero-llm doctor")


def test_a_known_causes_own_advice_comes_first():
    report = verdict(outcome(0), outcome(1, Ending.FAILED, "words", next=("do this",)), outcome(2))
    assert report.next[0] == "do this"


def test_ranks_on_one_device_are_refused_although_their_sums_are_right():
    shared = [outcome(0, device_id="GPU-1"), outcome(1, device_id="GPU-1"), outcome(2, device_id="GPU-1")]
    report = verdict(*shared)
    assert report.message.startswith("ranks 0 and 1 on a both ran on device GPU-1")
    assert report.message.endswith("instead of u0 and u1")


def test_a_rank_that_used_another_backend_is_refused_although_its_sum_is_right():
    report = verdict(outcome(0, backend="nccl"), outcome(1, backend="nccl"), outcome(2, backend="gloo"))
    assert report.message == "rank 2 on b (device u2) used gloo in the nccl pre-flight"


@pytest.mark.parametrize(
    "cause",
    [
        "socketStartConnect: Connect to 10.0.0.2<43215> failed : Software caused connection abort (NCCL error …)",
        "DistNetworkError: The client socket has timed out after 8000ms while trying to connect to (10.0.0.9, 29500).",
        "[Errno 113] No route to host",
        CLOSED,
        TIMED_OUT,
        "EI0006: Getting socket times out",
        "waited 25 s: rank 2 never came",
        "not done after 28 s",
    ],
)
def test_what_another_rank_may_explain_better_is_waited_for(cause):
    assert not explains_itself(outcome(0, Ending.FAILED, cause))


def test_a_rank_that_passed_explains_nothing():
    assert not explains_itself(outcome(0))
