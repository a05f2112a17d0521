"""run_preflight with small rank programs: the first rank to fail is named, the others are stopped."""

import dataclasses
import re
import sys
import threading
import time

import psutil
import pytest
from whole_preflight import run_preflight

from hetero_llm.cluster.group import run_ranks
from hetero_llm.cluster.group_verdict import Ending
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import Device, GroupSetup, GroupSpec, RankSpec, RootCausePattern

RANK = """
import os, sys, time
from pathlib import Path
Path(os.environ["SEEN"], os.environ["RANK"]).write_text(f"{os.getpid()} {os.environ.get('STALE')}")
print(os.environ.get("SAY", ""), flush=True)
time.sleep(float(os.environ.get("SLEEP_S", "0")))
sys.exit(os.environ.get("FAIL") or 0)
"""


def spec(deadline_s=30.0, nodes=("here", "here")):
    ranks = (
        RankSpec(
            rank=n, node=node, address="127.0.0.1", device=Device(kind="stub", accelerator="s", uid=f"d{n}", index=n)
        )
        for n, node in enumerate(nodes)
    )
    return GroupSpec(
        ranks=tuple(ranks), tp=2, pp=1, master_address="127.0.0.1", master_port=29500, deadline_s=deadline_s
    )


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Return a function: variables of rank 0 and of rank 1 → GroupSetup."""
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("STALE", "left over")

    def make(*envs):
        return GroupSetup(
            torch_backend="gloo",
            rank_env=tuple({"RANK": str(n), "SEEN": str(seen), **env} for n, env in enumerate(envs)),
            preflight_argv=(sys.executable, "-c", RANK),
            env_remove=("STALE",),
        )

    before = threading.active_count()
    yield make
    pids = [int(path.read_text().split()[0]) for path in seen.iterdir()]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert threading.active_count() == before


def ran(tmp_path):
    return sorted(path.name for path in (tmp_path / "seen").iterdir())


def test_each_rank_runs_once_with_its_own_variables(setup, tmp_path):
    report = run_preflight(setup({}, {}), spec())
    assert ran(tmp_path) == ["0", "1"]
    assert [(outcome.rank, outcome.ending) for outcome in report.ranks] == [(0, Ending.PASSED), (1, Ending.PASSED)]


def test_a_program_that_measures_nothing_leaves_the_bandwidth_unmeasured(setup):
    assert run_preflight(setup({}, {}), spec()).bandwidth_bytes_per_s is None


def test_variables_that_must_not_reach_the_ranks_do_not(setup, tmp_path):
    run_preflight(setup({}, {}), spec())
    assert {path.read_text().split()[1] for path in (tmp_path / "seen").iterdir()} == {"None"}


def test_a_group_without_preflight_starts_nothing_and_says_so():
    report = run_preflight(GroupSetup(torch_backend="gloo", rank_env=({}, {})), spec())
    assert report.ranks == ()
    assert report.not_run == "the gloo backend asks for none for a group of this shape"


def test_nothing_is_run_on_simulated_devices_and_the_report_says_so(setup, tmp_path):
    pretended = tuple(
        dataclasses.replace(rank, device=dataclasses.replace(rank.device, simulated=True, stand_in="sim"))
        for rank in spec().ranks
    )
    report = run_preflight(setup({}, {}), dataclasses.replace(spec(), ranks=pretended))
    assert ran(tmp_path) == []
    assert "simulated" in report.not_run


def test_the_first_rank_to_fail_is_named_with_its_reason(setup):
    began = time.monotonic()
    with pytest.raises(GroupPreflightFailed) as failed:
        run_preflight(setup({"SLEEP_S": "600"}, {"FAIL": "device 1 is on fire"}), spec())
    assert str(failed.value) == "rank 1 on here (device d1) failed in the gloo pre-flight"
    assert failed.value.report.cause == "device 1 is on fire"
    assert time.monotonic() - began < 30.0


def test_a_rank_that_lost_its_peer_waits_for_the_peers_own_reason(setup):
    lost = {"FAIL": "Connection closed by peer"}
    own = {"SLEEP_S": "0.5", "FAIL": "device 1 is on fire"}
    with pytest.raises(GroupPreflightFailed, match=r"rank 1 on here .* failed") as failed:
        run_preflight(setup(lost, own), spec())
    assert failed.value.report.cause == "device 1 is on fire"


def test_a_lost_peer_is_reported_when_nobody_knows_more(setup):
    lost = {"FAIL": "Connection closed by peer"}
    with pytest.raises(GroupPreflightFailed, match=r"rank 0 on here .* failed") as failed:
        run_preflight(setup(lost, {"SLEEP_S": "600"}), spec())
    assert failed.value.report.cause == "Connection closed by peer; rank 1 on here stopped"
    assert failed.value.report.next[0].startswith("check that 127.0.0.1 reaches 127.0.0.1:29500")


def test_a_rank_that_hangs_is_named_at_the_deadline(setup):
    with pytest.raises(GroupPreflightFailed, match=r"rank 1 on here \(device d1\) did not finish within 2 s"):
        run_preflight(setup({}, {"SLEEP_S": "600"}), spec(deadline_s=2.0))


def test_the_interface_a_rank_was_given_is_named_even_if_its_program_says_nothing(setup):
    with pytest.raises(GroupPreflightFailed, match=r"device d1; interface eth7"):
        run_preflight(setup({}, {"FAIL": "no", "GLOO_SOCKET_IFNAME": "eth7"}), spec())


def test_a_librarys_cryptic_line_is_put_into_words(setup):
    hint = RootCausePattern(
        pattern=re.compile(r"EI0006"), message="a rank never came to the socket", next=("look at HCCL_IF_IP",)
    )
    said = {"SAY": "[ERROR] EI0006: Getting socket times out", "FAIL": "error code is 9"}
    with pytest.raises(GroupPreflightFailed) as failed:
        run_preflight(setup({"SLEEP_S": "600"}, said), spec(), hints=(hint,))
    assert failed.value.report.cause.startswith("a rank never came to the socket")
    assert failed.value.report.next[0] == "look at HCCL_IF_IP"


def test_a_program_that_does_not_exist_is_a_failure_of_its_rank(setup):
    missing = dataclasses.replace(setup({}, {}), preflight_argv=("/no/such/program",))
    with pytest.raises(GroupPreflightFailed, match=r"rank 0 on here .* could not be started") as failed:
        run_preflight(missing, spec())
    assert "/no/such/program" in failed.value.report.cause


def test_a_rank_that_cannot_be_started_leaves_no_other_behind(setup):
    good = setup({"SLEEP_S": "600"}, {})
    # A variable no process can be given: rank 0 runs already when rank 1 fails to start.
    bad = GroupSetup(
        torch_backend="gloo",
        rank_env=(good.rank_env[0], {**good.rank_env[1], "BAD": "nul\0byte"}),
        preflight_argv=good.preflight_argv,
    )
    with pytest.raises(ValueError, match="null byte"):
        run_preflight(bad, spec())


def test_a_node_runs_its_own_ranks_only(setup, tmp_path):
    outcomes = run_ranks(setup({}, {}), spec(nodes=("here", "there")), node="there")
    assert ran(tmp_path) == ["1"]
    assert [(outcome.rank, outcome.node) for outcome in outcomes] == [(1, "there")]


def test_a_group_over_nodes_is_not_run_as_if_it_were_on_one(setup, tmp_path):
    with pytest.raises(ValueError, match="the group is on 2 nodes: here, there"):
        run_preflight(setup({}, {}), spec(nodes=("here", "there")))
    assert ran(tmp_path) == []


def test_the_ranks_are_stopped_when_another_node_calls_it_off(setup):
    called_off = threading.Event()
    threading.Timer(0.5, called_off.set).start()
    long = {"SLEEP_S": "600"}
    outcomes = run_ranks(setup(long, long), spec(deadline_s=300), node="here", cancelled=called_off)
    assert {outcome.ending for outcome in outcomes} == {Ending.STOPPED}
