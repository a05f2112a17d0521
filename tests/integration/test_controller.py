"""The scheduler actor on a real cluster: leases, the long poll, and its own death."""

import threading
import time

import msgspec
import psutil
import pytest
from local_cluster import is_gone, kill_scheduler, local_cluster, ray, scheduler_pids, wait_for

from hetero_llm.cluster.deploy import newer_snapshot
from hetero_llm.cluster.names import LEASE_LATE_S, LEASE_PERIOD_S
from hetero_llm.cluster.pools import ConfiguredModel
from hetero_llm.model import ModelEntry, ReplicaState, ReplicaStatus

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as running:
        yield running


@pytest.fixture
def model(cluster):
    scheduler = cluster.session.scheduler
    entry = ModelEntry(name="m", source="m", created_unix_s=1)
    ray.get(scheduler.put_model.remote(msgspec.json.encode(ConfiguredModel(entry=entry))))
    yield "m"
    ray.get(scheduler.remove_model.remote("m"))


class Holder:
    """An actor that stands for a replica: it only has to live."""

    def pid(self):
        import os

        return os.getpid()


@pytest.fixture
def holder():
    actor = ray.remote(Holder).options(num_cpus=0).remote()
    pid = ray.get(actor.pid.remote())
    yield actor._actor_id.hex(), pid
    ray.kill(actor)


def status(replica, state=ReplicaState.READY):
    return ReplicaStatus(
        replica=replica,
        model="m",
        app="m-app",
        kind="stub",
        accelerator="s1",
        node="here",
        state=state,
        started_unix_s=1.0,
        endpoint="127.0.0.1:9" if state is ReplicaState.READY else None,
    )


class Renewals:
    """Renews leases as replicas do: twice a second, and a renewal that fails is not repeated."""

    def __init__(self, cluster, actor_id, *replicas):
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, args=(cluster, actor_id, replicas))

    def run(self, cluster, actor_id, replicas):
        while not self.stop.is_set():
            for replica in replicas:
                try:
                    cluster.renew(status(replica), actor_id)
                except ray.exceptions.RayActorError:
                    continue
            self.stop.wait(LEASE_PERIOD_S)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        self.thread.join()


def test_a_question_for_a_newer_table_waits_until_there_is_one(cluster, model, holder):
    version = cluster.table().version
    began = time.monotonic()
    threading.Timer(0.5, cluster.renew, args=(status("r1"), holder[0])).start()
    table = newer_snapshot(cluster.session, newer_than=version, timeout_s=20.0)
    assert 0.4 < time.monotonic() - began < 10.0
    assert table.version > version
    assert [target.replica for target in table.targets] == ["r1"]


def test_a_question_for_a_newer_table_is_given_up_when_nothing_changes(cluster, model):
    assert newer_snapshot(cluster.session, newer_than=cluster.table().version, timeout_s=0.3) is None


def test_a_late_lease_of_a_dead_actor_becomes_a_failure_that_says_so(cluster, model, holder):
    actor_id, pid = holder
    cluster.renew(status("r1"), actor_id)
    psutil.Process(pid).kill()
    (dead,) = cluster.wait_replicas(
        model, lambda seen: [one.state for one in seen] == [ReplicaState.FAILED], deadline_s=5.0
    )
    assert dead.error["code"] == "HL406"
    assert dead.error["cause"]
    assert cluster.table().targets == ()


def test_a_late_lease_of_a_living_actor_changes_nothing(cluster, model, holder):
    cluster.renew(status("slow"), holder[0])
    version = cluster.table().version
    time.sleep(LEASE_LATE_S + 2 * LEASE_PERIOD_S)
    table = cluster.table()
    assert (table.version, [target.replica for target in table.targets]) == (version, ["slow"])


def test_everybody_late_at_once_removes_only_the_dead(cluster, model, holder):
    dead = ray.remote(Holder).options(num_cpus=0).remote()
    pid = ray.get(dead.pid.remote())
    cluster.renew(status("lost"), dead._actor_id.hex())
    cluster.renew(status("slow"), holder[0])
    psutil.Process(pid).kill()
    wait_for(lambda: [target.replica for target in cluster.table().targets] == ["slow"], deadline_s=10.0)


def test_a_killed_scheduler_comes_back_and_forgets_neither_models_nor_living_replicas(cluster, model, holder):
    with Renewals(cluster, holder[0], "r1", "r2"):
        wait_for(lambda: len(cluster.table().targets) == 2)
        before = cluster.table()
        pid = kill_scheduler(cluster.session)
        # Who asks meanwhile waits for it, and needs to know nothing of its death.
        tables = [newer_snapshot(cluster.session, newer_than=-1, timeout_s=10.0) for _ in range(3)]
    assert is_gone(pid)
    assert len(scheduler_pids(cluster.session)) == 1
    assert all(table.version > before.version for table in tables)
    assert {entry.name for table in tables for entry in table.models} == {"m"}
    assert {frozenset(target.replica for target in table.targets) for table in tables} == {frozenset({"r1", "r2"})}


def test_a_restarted_scheduler_keeps_the_inventory(cluster):
    before = cluster.session.inventory()
    kill_scheduler(cluster.session)
    assert cluster.session.inventory() == before
    assert [len(node.devices) for node in before.nodes] == [4]
