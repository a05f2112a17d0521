"""One replica over two Ray nodes: an engine process on each, and the whole group ends and comes back as one."""

import re
from pathlib import Path

import psutil
import pytest
import stub_backend
from local_cluster import is_gone, local_cluster, ray, wait_for

from hetero_llm.cluster.deploy import delete_model
from hetero_llm.cluster.lease import holders
from hetero_llm.model import ReplicaState

pytestmark = pytest.mark.ray

DEVICES = ("stub-0", "stub-1", "there-0", "there-1")


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(2, stub_backend.node(2, "there")) as running:
        yield running


@pytest.fixture
def model(cluster, request):
    name = re.sub(r"\W+", "-", request.node.name)[:40].strip("-")
    yield name
    delete_model(cluster.session, name)
    wait_for(lambda: holders(DEVICES) == {})


def all_ready(seen):
    return [status.state for status in seen] == [ReplicaState.READY]


def engines(cluster, model):
    """Return the engine processes of `model` by node rank."""
    found = {}
    for process in cluster.box.processes():
        words = process.cmdline()
        if str(stub_backend.ENGINE) in words and model in words:
            found[int(words[words.index("--node-rank") + 1])] = process
    return found


def test_each_node_runs_an_engine_on_its_own_devices(cluster, model):
    cluster.deploy(model, DEVICES, nodes=2)
    (status,) = cluster.wait_replicas(model, all_ready)
    # Ray chooses which node leads.
    assert sorted(status.devices) == sorted(DEVICES)
    assert status.tp == 4
    by_rank = engines(cluster, model)
    assert set(by_rank) == {0, 1}
    assert by_rank[0].pid == status.engine_pid
    seen = [by_rank[rank].environ()["STUB_DEVICES"].split(",") for rank in (0, 1)]
    assert [len(devices) for devices in seen] == [2, 2]
    assert (*seen[0], *seen[1]) == status.devices
    actors = {psutil.Process(process.ppid()).ppid() for process in by_rank.values()}
    assert len(actors) == 2, "the two actors belong to two raylets"


@pytest.mark.parametrize("rank", [0, 3])
def test_c1_c4_a_rank_that_fails_the_preflight_is_named_and_no_engine_starts(cluster, model, rank):
    fails = cluster.box.root / "preflight"
    fails.write_text(str(rank))
    try:
        cluster.deploy(model, DEVICES, nodes=2)
        # Far below the deadline of the pre-flight: the ranks that wait are called off on both nodes.
        seen = cluster.wait_replicas(
            model, lambda seen: any(s.state is ReplicaState.FAILED for s in seen), deadline_s=20.0
        )
    finally:
        fails.unlink()
    failed = next(status for status in seen if status.state is ReplicaState.FAILED)
    assert failed.error["code"] == "HL503"
    assert f"rank {rank} on " in failed.error["message"]
    assert "the link of this rank is down" in failed.error["cause"]
    assert (failed.engine_pid, failed.log) == (None, None)


def test_every_rank_takes_part_in_the_preflight_once(cluster, model):
    ran = cluster.box.root / "preflight.ran"
    ran.unlink(missing_ok=True)
    cluster.deploy(model, DEVICES, nodes=2)
    cluster.wait_replicas(model, all_ready)
    assert sorted(ran.read_text().split()) == ["0", "1", "2", "3"]


def test_an_engine_that_ends_on_the_further_node_takes_the_group_along_and_is_the_cause(cluster, model):
    flags = ("--only-rank", 1, "--die", "start", "--say", "ValueError: no kernel for head size 16")
    cluster.deploy(model, DEVICES, nodes=2, flags=flags)
    seen = cluster.wait_replicas(model, lambda seen: any(s.state is ReplicaState.FAILED for s in seen))
    failed = next(status for status in seen if status.state is ReplicaState.FAILED)
    assert failed.error["message"] == "head size 16 is not one"
    assert is_gone(failed.engine_pid)


def test_a_group_that_lost_a_rank_comes_back_whole(cluster, model):
    cluster.deploy(model, DEVICES, nodes=2)
    (first,) = cluster.wait_replicas(model, all_ready)
    before = engines(cluster, model)
    before[1].kill()
    wait_for(lambda: all(is_gone(process.pid) for process in before.values()))
    (second,) = cluster.wait_replicas(model, lambda seen: all_ready(seen) and seen[0].replica != first.replica)
    after = engines(cluster, model)
    assert set(after) == {0, 1}
    assert sorted(second.devices) == sorted(DEVICES)


def test_a_killed_leader_leaves_no_engine_on_the_other_node(cluster, model):
    cluster.deploy(model, DEVICES, nodes=2)
    (first,) = cluster.wait_replicas(model, all_ready)
    before = engines(cluster, model)
    psutil.Process(first.actor_pid).kill()
    wait_for(lambda: all(is_gone(process.pid) for process in before.values()), deadline_s=15.0)
    cluster.wait_replicas(model, lambda seen: all_ready(seen) and seen[0].replica != first.replica)


def test_a_deleted_group_is_gone_from_both_nodes(cluster, model):
    cluster.deploy(model, DEVICES, nodes=2)
    cluster.wait_replicas(model, all_ready)
    processes = engines(cluster, model)
    delete_model(cluster.session, model)
    assert all(is_gone(process.pid) for process in processes.values())
    wait_for(lambda: holders(DEVICES) == {})
    wait_for(lambda: ray.available_resources().get("hetero_stub") == 4.0)


def test_the_log_of_the_further_node_is_kept_beside_that_of_the_first(cluster, model):
    cluster.deploy(model, DEVICES, nodes=2)
    (status,) = cluster.wait_replicas(model, all_ready)
    log = Path(status.log)
    assert log.with_name(f"{status.replica}.node1.log").exists()
