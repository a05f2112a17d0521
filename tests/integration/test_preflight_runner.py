"""run_preflight with small rank programs: the first rank to fail is named, the others are stopped."""

import sys
import threading
import time

import psutil
import pytest

from hetero_llm.cluster.group import run_preflight
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import Device, GroupSetup, GroupSpec, RankSpec

RANK = """
import os, sys, time
from pathlib import Path
Path(os.environ["SEEN"], os.environ["RANK"]).write_text(f"{os.getpid()} {os.environ.get('STALE')}")
time.sleep(float(os.environ.get("SLEEP_S", "0")))
sys.exit(os.environ.get("FAIL") or 0)
"""


def spec(deadline_s=30.0):
    ranks = (
        RankSpec(
            rank=n, node="here", address="127.0.0.1", device=Device(kind="stub", accelerator="s", uid=f"d{n}", index=n)
        )
        for n in range(2)
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


def test_each_rank_runs_once_with_its_own_variables(setup, tmp_path):
    run_preflight(setup({}, {}), spec())
    assert sorted(path.name for path in (tmp_path / "seen").iterdir()) == ["0", "1"]


def test_variables_that_must_not_reach_the_ranks_do_not(setup, tmp_path):
    run_preflight(setup({}, {}), spec())
    assert {path.read_text().split()[1] for path in (tmp_path / "seen").iterdir()} == {"None"}


def test_a_group_without_preflight_starts_nothing():
    run_preflight(GroupSetup(torch_backend="gloo", rank_env=({}, {})), spec())


def test_the_first_rank_to_fail_is_named_with_its_reason(setup):
    began = time.monotonic()
    with pytest.raises(GroupPreflightFailed) as failed:
        run_preflight(setup({"SLEEP_S": "600"}, {"FAIL": "connection refused by 10.0.0.1"}), spec())
    assert "rank 1 on here (device d1) exited with code 1 in the gloo pre-flight" in str(failed.value)
    assert failed.value.report.cause == "connection refused by 10.0.0.1"
    assert time.monotonic() - began < 10.0


def test_a_rank_that_hangs_is_named_at_the_deadline(setup):
    began = time.monotonic()
    with pytest.raises(GroupPreflightFailed, match=r"rank 1 on here \(device d1\) did not finish within 2 s"):
        run_preflight(setup({}, {"SLEEP_S": "600"}), spec(deadline_s=2.0))
    assert time.monotonic() - began < 10.0


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
