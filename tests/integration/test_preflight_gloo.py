"""The pre-flight with real ranks: over Gloo, and over a vendor's backend of which one rank misbehaves."""

import dataclasses
import socket
import sys
from pathlib import Path

import psutil
import pytest
from hetero_llm_cpu.plugin import CpuBackend
from whole_preflight import run_preflight

from hetero_llm.cluster.group_verdict import Ending
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import Device, GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.rank_line import PHASES

SUPPORT = Path(__file__).parents[1] / "support"
PROGRAM = (sys.executable, "-m", "hetero_llm.plugin.preflight")
ACME = ("--backend", "acme", "--device", "cpu", "--import", "acme_collectives")


@pytest.fixture(autouse=True)
def nothing_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spec(size, deadline_s=120.0, master="127.0.0.1"):
    ranks = (
        RankSpec(
            rank=n, node="here", address="127.0.0.1", device=Device(kind="cpu", accelerator="x", uid=f"c{n}", index=n)
        )
        for n in range(size)
    )
    return GroupSpec(
        ranks=tuple(ranks), tp=size, pp=1, master_address=master, master_port=free_port(), deadline_s=deadline_s
    )


def other_backend(group, *arguments, backend="acme", faults=None):
    """Return the set-up of `group` with another collective backend; `faults` are what single ranks do wrong."""
    setup = CpuBackend().group(group)
    env = tuple(
        {**rank, "PYTHONPATH": str(SUPPORT), "ACME_FAULT": (faults or {}).get(n, "")}
        for n, rank in enumerate(setup.rank_env)
    )
    argv = (*PROGRAM, *arguments, "--deadline-s", f"{group.deadline_s:g}")
    return GroupSetup(torch_backend=backend, rank_env=env, preflight_argv=argv, env_remove=setup.env_remove)


def failure(setup, group):
    with pytest.raises(GroupPreflightFailed) as failed:
        run_preflight(setup, group)
    return failed.value.report


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_ranks_of_a_group_meet_add_and_measure(size):
    group = spec(size)
    report = run_preflight(CpuBackend().group(group), group)
    assert [outcome.rank for outcome in report.ranks] == list(range(size))
    assert report.bandwidth_bytes_per_s == min(outcome.bandwidth_bytes_per_s for outcome in report.ranks) > 0
    for outcome in report.ranks:
        assert (outcome.ending, outcome.backend, outcome.interfaces) == (Ending.PASSED, "gloo", ("lo",))
        assert outcome.versions["torch"]
        assert list(outcome.seconds) == list(PHASES[:-1])


def test_a_vendors_backend_is_brought_by_its_module():
    group = spec(2)
    report = run_preflight(other_backend(group, *ACME), group)
    assert [outcome.backend for outcome in report.ranks] == ["acme", "acme"]
    assert report.ranks[0].versions["acme_collectives"] == "7.1"


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        # Place 5 of three ranks: 6 + 7 + 8.
        ("wrong", "the all-reduce is wrong: 22 at place 5, not 21"),
        ("raise", "RuntimeError: acme: link 3 is down"),
    ],
)
def test_the_rank_that_fails_is_named_and_not_those_that_lose_it(fault, cause):
    group = spec(3)
    report = failure(other_backend(group, *ACME, faults={1: fault}), group)
    assert report.message.startswith("rank 1 on here (device c1; interface lo; torch ")
    assert "acme_collectives 7.1) failed in its phase all-reduce in the acme pre-flight" in report.message
    assert report.cause == cause


def test_a_rank_that_is_killed_is_named_and_the_others_are_stopped_long_before_the_deadline():
    group = spec(3, deadline_s=280.0)
    report = failure(other_backend(group, *ACME, faults={2: "die"}), group)
    assert report.message.startswith("rank 2 on here (device c2; interface lo; torch ")
    assert "was killed by signal 9 in its phase all-reduce" in report.message
    assert report.next[0].startswith("see whether the kernel killed it for lack of memory")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang", "hang-locked"])
def test_a_rank_that_hangs_ends_by_its_deadline_whatever_lock_it_holds(fault):
    group = spec(1, deadline_s=15.0)
    # Longer than the rank's own deadline: it must end by itself.
    report = failure(other_backend(group, *ACME, faults={0: fault}), dataclasses.replace(group, deadline_s=120.0))
    assert "failed in its phase all-reduce" in report.message
    assert report.cause.startswith("not done after")


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_hangs_say_so_and_where_it_was():
    group = spec(2, deadline_s=20.0)
    report = failure(other_backend(group, *ACME, faults={1: "hang"}), group)
    assert "in its phase all-reduce" in report.message
    assert "rank 1 on here" in report.message + report.cause


@pytest.mark.slow
def test_a_master_that_cannot_be_reached_is_told_before_the_deadline_with_rank_and_interface():
    # Reserved for documentation (RFC 5737): nobody answers there.
    group = dataclasses.replace(spec(2, deadline_s=15.0), master_address="192.0.2.1")
    setup = CpuBackend().group(group)
    ours = dataclasses.replace(setup, rank_env=tuple({**env, "GLOO_SOCKET_IFNAME": "lo"} for env in setup.rank_env))
    report = failure(ours, group)
    assert report.message.startswith("rank 1 on here (device c1; interface lo; torch ")
    assert "failed in its phase meeting in the gloo pre-flight" in report.message
    assert report.cause.startswith(f"no connection to rank 0 at 192.0.2.1:{group.master_port} within")
    assert any("reaches 192.0.2.1:" in step for step in report.next)


def test_a_name_nobody_knows_is_told_at_once():
    group = dataclasses.replace(spec(2, deadline_s=280.0), master_address="no-such-host.invalid")
    report = failure(CpuBackend().group(group), group)
    assert report.message.startswith("rank 1 on here")
    assert report.cause.startswith("the name no-such-host.invalid of rank 0's address is not known")


def test_an_interface_that_does_not_exist_is_named():
    group = spec(2)
    setup = CpuBackend().group(group)
    wrong = dataclasses.replace(setup, rank_env=tuple({**env, "GLOO_SOCKET_IFNAME": "nope0"} for env in setup.rank_env))
    report = failure(wrong, group)
    assert "interface nope0" in report.message
    assert "nope0" in report.cause


def test_a_taken_port_is_the_cause_not_the_ranks_that_wait():
    group = spec(2)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", group.master_port))
        taken.listen()
        report = failure(CpuBackend().group(group), group)
    assert report.message.startswith("rank 0 on here")
    assert "address already in use" in report.cause


@pytest.mark.parametrize(
    ("backend", "arguments", "cause"),
    [
        ("nccl", ("--device", "cuda"), "has no backend nccl (it has gloo)"),
        ("hccl", ("--device", "npu"), "has no backend hccl (it has gloo)"),
        ("hccl", ("--device", "npu", "--import", "torch_npu"), "torch_npu, which brings the backend hccl, cannot be"),
        ("glo", ("--device", "cpu"), "has no backend glo (it has gloo)"),
    ],
)
def test_a_missing_backend_is_an_error_and_never_gloo_instead(backend, arguments, cause):
    group = spec(2)
    report = failure(other_backend(group, "--backend", backend, *arguments, backend=backend), group)
    assert f"failed in its phase backend in the {backend} pre-flight" in report.message
    assert cause in report.cause


def test_a_device_torch_does_not_see_is_an_error():
    group = spec(2)
    arguments = ("--backend", "acme", "--import", "acme_collectives", "--device", "cuda")
    report = failure(other_backend(group, *arguments), group)
    assert "failed in its phase device" in report.message
    assert report.cause.startswith("torch sees no usable cuda device")
