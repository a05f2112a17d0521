"""The pre-flight of a group over two nodes: two network namespaces with a link between them, each with its runner."""

import dataclasses
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hetero_llm_cpu.plugin import CpuBackend

from hetero_llm.cluster.group import run_ranks
from hetero_llm.cluster.group_verdict import Ending, judge
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import Device, GroupSpec, RankSpec

SUPPORT = Path(__file__).parents[1] / "support"
ACME = (sys.executable, "-m", "hetero_llm.plugin.preflight", "--backend", "acme", "--device", "cpu")
ADDRESS = {"a": "10.99.7.1", "b": "10.99.7.2"}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def namespaces():
    """Return the namespace of each node; they are joined by one link, ``link-a`` to ``link-b``."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    names = {node: f"pf-{os.getpid()}-{node}" for node in ADDRESS}
    made = []
    try:
        for name in names.values():
            ip("netns", "add", name)
            made.append(name)
        # Made inside, so that nothing of it is ever seen by the machine's own network.
        ip("-n", names["a"], "link", "add", "link-a", "type", "veth", "peer", "name", "link-b", "netns", names["b"])
        for node, name in names.items():
            ip("-n", name, "addr", "add", f"{ADDRESS[node]}/24", "dev", f"link-{node}")
            ip("-n", name, "link", "set", f"link-{node}", "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        for name in made:
            ip("netns", "del", name)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
    yield names
    for name in made:
        ip("netns", "del", name)


def spec(deadline_s=120.0, nodes=("a", "b")):
    ranks = tuple(
        RankSpec(
            rank=n, node=node, address=ADDRESS[node], device=Device(kind="cpu", accelerator="x", uid=f"c{n}", index=n)
        )
        for n, node in enumerate(nodes)
    )
    return GroupSpec(
        ranks=ranks, tp=len(ranks), pp=1, master_address=ADDRESS["a"], master_port=29500, deadline_s=deadline_s
    )


def setup_in(namespace, group, program=None, env=None):
    """Return the backend's set-up as its node would have it: its interfaces, its network."""
    setup = CpuBackend().group(group)
    rank_env = tuple(
        {**own, "GLOO_SOCKET_IFNAME": f"link-{rank.node}", "ACME_SOCKET_IFNAME": f"link-{rank.node}", **(env or {})}
        for rank, own in zip(group.ranks, setup.rank_env, strict=True)
    )
    argv = ("ip", "netns", "exec", namespace, *(program or setup.preflight_argv))
    return dataclasses.replace(setup, rank_env=rank_env, preflight_argv=argv)


def on_both(group, setups):
    """Run the ranks of both nodes at the same time; return the outcomes per node."""
    with ThreadPoolExecutor() as pool:
        runs = {node: pool.submit(run_ranks, setup, group, node=node) for node, setup in setups.items()}
        return {node: run.result() for node, run in runs.items()}


def test_the_ranks_of_two_nodes_meet_over_the_link_between_them(namespaces):
    group = spec(nodes=("a", "b", "b"))
    setups = {node: setup_in(namespaces[node], group) for node in ADDRESS}
    outcomes = on_both(group, setups)
    report = judge(setups["a"], group, [*outcomes["b"], *outcomes["a"]])
    assert [(outcome.rank, outcome.node) for outcome in report.ranks] == [(0, "a"), (1, "b"), (2, "b")]
    assert [outcome.interfaces for outcome in report.ranks] == [("link-a",), ("link-b",), ("link-b",)]
    assert report.bandwidth_bytes_per_s > 0


@pytest.mark.slow
def test_a_pulled_cable_is_told_within_the_deadline_naming_rank_node_and_interface(namespaces):
    ip("-n", namespaces["b"], "link", "set", "link-b", "down")
    group = spec(deadline_s=20.0)
    setups = {node: setup_in(namespaces[node], group) for node in ADDRESS}
    outcomes = on_both(group, setups)
    assert {outcome.ending for node in outcomes for outcome in outcomes[node]} == {Ending.FAILED}
    with pytest.raises(GroupPreflightFailed) as failed:
        judge(setups["a"], group, [*outcomes["a"], *outcomes["b"]])
    report = failed.value.report
    assert report.message.startswith("rank 1 on b (device c1; interface link-b; torch ")
    assert report.cause.startswith("no connection to rank 0 at 10.99.7.1:29500")
    assert "rank 0 on a failed in its phase meeting" in report.cause


def test_a_rank_that_dies_on_one_node_ends_those_of_the_other_and_is_the_one_named(namespaces):
    group = spec(deadline_s=280.0)
    program = (*ACME, "--import", "acme_collectives", "--deadline-s", "280")
    fault = {"a": "", "b": "die"}
    setups = {
        node: dataclasses.replace(
            setup_in(namespaces[node], group, program, {"PYTHONPATH": str(SUPPORT), "ACME_FAULT": fault[node]}),
            torch_backend="acme",
        )
        for node in ADDRESS
    }
    outcomes = on_both(group, setups)
    with pytest.raises(GroupPreflightFailed) as failed:
        judge(setups["a"], group, [*outcomes["a"], *outcomes["b"]])
    assert failed.value.report.message.startswith("rank 1 on b (device c1; interface link-b; torch ")
    assert "was killed by signal 9 in its phase all-reduce" in failed.value.report.message


def test_ranks_that_wait_for_another_node_are_stopped_when_it_has_failed(namespaces):
    group = spec(deadline_s=280.0)
    cancelled = threading.Event()
    setup = setup_in(namespaces["a"], group)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(run_ranks, setup, group, node="a", cancelled=cancelled)
        cancelled.set()
        assert [outcome.ending for outcome in waiting.result()] == [Ending.STOPPED]
