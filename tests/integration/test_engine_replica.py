"""EngineReplica as a real Serve deployment on a real cluster; only the engine program is a small one."""

import re
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from local_cluster import is_gone, kill_scheduler, local_cluster, ray, scheduler_pids, wait_for

from hetero_llm.cluster.deploy import delete_model
from hetero_llm.cluster.lease import holders
from hetero_llm.model import ReplicaState

pytestmark = pytest.mark.ray

DEVICES = tuple(f"stub-{n}" for n in range(4))


@pytest.fixture(scope="module")
def cluster():
    with local_cluster(len(DEVICES)) as running:
        yield running


@pytest.fixture
def model(cluster, request):
    """A model name of the test's own; the model is deleted at the end and has left nothing on the node."""
    name = re.sub(r"\W+", "-", request.node.name)[:40].strip("-")
    yield name
    delete_model(cluster.session, name)
    assert holders(DEVICES) == {}


def all_ready(count):
    return lambda seen: [status.state for status in seen] == [ReplicaState.READY] * count


def complete(status, **body):
    answer = httpx.post(f"http://{status.endpoint}/v1/completions", json={"prompt": "x", **body})
    assert answer.status_code == 200
    return answer.json()["choices"][0]["text"]


def test_a_replica_says_what_it_holds_and_where_it_answers(cluster, model):
    cluster.deploy(model, ("stub-0", "stub-1"))
    (status,) = cluster.wait_replicas(model, all_ready(1))
    assert status.devices == ("stub-0", "stub-1")
    assert (status.kind, status.accelerator, status.node, status.tp) == ("stub", "s1", "here", 2)
    assert (status.kv_tokens, status.phase, status.error) == (1024, None, None)
    assert status.ready_after_s > 0
    assert complete(status, max_tokens=3) == "xxx"
    keeper = psutil.Process(status.engine_pid).parent()
    assert keeper.ppid() == status.actor_pid
    assert "Starting to load model" in Path(status.log).read_text()
    held = {device.uid: device.held_by for device in cluster.session.inventory().nodes[0].devices}
    assert held == {"stub-0": status.replica, "stub-1": status.replica, "stub-2": None, "stub-3": None}


def test_two_replicas_of_a_model_hold_different_devices_and_their_engines_see_only_those(cluster, model):
    cluster.deploy(model, ("stub-1",), ("stub-2",))
    replicas = cluster.wait_replicas(model, all_ready(2))
    assert sorted(status.devices for status in replicas) == [("stub-1",), ("stub-2",)]
    seen = [psutil.Process(status.engine_pid).environ()["STUB_DEVICES"] for status in replicas]
    assert seen == [",".join(status.devices) for status in replicas]


def test_a_start_that_fails_stays_visible_with_its_root_cause(cluster, model):
    cluster.deploy(model, ("stub-0",), flags=("--die", "start", "--say", "ValueError: no kernel for head size 16"))
    seen = cluster.wait_replicas(model, lambda seen: len([s for s in seen if s.state is ReplicaState.FAILED]) >= 2)
    failed = [status for status in seen if status.state is ReplicaState.FAILED]
    assert {status.error["code"] for status in failed} == {"HL501"}
    assert {status.error["message"] for status in failed} == {"head size 16 is not one"}
    assert all(is_gone(status.engine_pid) for status in failed)


def test_a_start_that_serve_gave_up_is_tried_again_and_people_are_told_why_and_when(cluster, model):
    repaired = cluster.box.root / "repaired"
    flags = ("--die-until", repaired, "--say", "ValueError: no kernel for head size 16")
    cluster.deploy(model, ("stub-0",), flags=flags)
    (app,) = {status.app for status in cluster.wait_replicas(model, bool)}
    wait_for(lambda: ray.serve.status().applications[app].status == "DEPLOY_FAILED")
    told = f"{app} failed: head size 16 is not one; it is tried again after 15 s"
    wait_for(lambda: cluster.table().notes.get(model) == told)
    repaired.touch()
    cluster.wait_replicas(model, lambda seen: any(status.state is ReplicaState.READY for status in seen))
    wait_for(lambda: model not in cluster.table().notes)


def test_a_replica_that_dies_while_the_scheduler_is_away_leaves_no_phantom(cluster, model):
    cluster.deploy(model, ("stub-0",), ("stub-1",))
    before = cluster.wait_replicas(model, all_ready(2))
    kill_scheduler(cluster.session)
    psutil.Process(before[0].actor_pid).kill()
    wait_for(lambda: len(scheduler_pids(cluster.session)) == 1)
    after = cluster.wait_replicas(
        model, lambda seen: all_ready(2)(seen) and before[0].replica not in {status.replica for status in seen}
    )
    assert before[1].replica in {status.replica for status in after}
    targets = {target.replica for target in cluster.table().targets if target.model == model}
    assert targets == {status.replica for status in after}
    held = {device.uid: device.held_by for device in cluster.session.inventory().nodes[0].devices}
    assert held == {uid: status.replica for status in after for uid in status.devices} | {
        "stub-2": None,
        "stub-3": None,
    }


def test_a_killed_engine_is_named_and_replaced(cluster, model):
    cluster.deploy(model, ("stub-0",))
    (first,) = cluster.wait_replicas(model, all_ready(1))
    psutil.Process(first.engine_pid).kill()
    seen = cluster.wait_replicas(model, lambda seen: seen and seen[0].state is ReplicaState.FAILED)
    assert seen[0].replica == first.replica
    assert seen[0].error["code"] == "HL501"
    assert "was ended by signal 9 while ready" in seen[0].error["message"]
    (second,) = cluster.wait_replicas(model, all_ready(1))
    assert second.replica != first.replica
    assert is_gone(first.actor_pid)
    assert complete(second, max_tokens=1) == "x"


def test_a_killed_actor_takes_its_engine_along_and_is_replaced_on_the_same_device(cluster, model):
    cluster.deploy(model, ("stub-3",), flags=("--grandchildren", 1, "--shared-memory"))
    (first,) = cluster.wait_replicas(model, all_ready(1))
    tree = psutil.Process(first.engine_pid).children(recursive=True)
    scratch = psutil.Process(first.engine_pid).environ()["TMPDIR"]
    segments = re.findall(r"shared memory (\S+)", Path(first.log).read_text())
    psutil.Process(first.actor_pid).kill()
    wait_for(lambda: is_gone(first.engine_pid) and all(is_gone(child.pid) for child in tree), deadline_s=5.0)
    # Bound to Ray's word, not to the missing lease.
    ready = (first.replica, ReplicaState.READY)
    wait_for(lambda: ready not in {(r.replica, r.state) for r in cluster.replicas(model)}, deadline_s=5.0)
    (second,) = cluster.wait_replicas(model, all_ready(1))
    assert second.replica != first.replica
    assert second.devices == first.devices
    assert not Path(scratch).exists()
    assert not [name for name in segments if Path("/dev/shm", name).exists()]


def test_a_deleted_model_finishes_the_stream_it_is_answering(cluster, model):
    cluster.deploy(model, ("stub-0",), flags=("--token-gap-s", 0.2))
    (status,) = cluster.wait_replicas(model, all_ready(1))
    body = {"prompt": "x", "max_tokens": 12, "stream": True}
    with httpx.stream("POST", f"http://{status.endpoint}/v1/completions", json=body, timeout=30.0) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        deleting = threading.Thread(target=delete_model, args=(cluster.session, model))
        deleting.start()
        cluster.wait_replicas(model, lambda seen: seen[0].state is ReplicaState.DRAINING, deadline_s=5.0)
        assert not [target for target in cluster.table().targets if target.model == model]
        assert [line for line in lines if line][-1] == "data: [DONE]"
    deleting.join(20.0)
    assert not deleting.is_alive()
    assert is_gone(status.engine_pid)


def test_a_model_deleted_while_it_starts_is_gone_soon(cluster, model):
    cluster.deploy(model, ("stub-0",), flags=("--hang", "start"))
    (status,) = cluster.wait_replicas(model, lambda seen: seen and seen[0].phase == "loading weights")
    began = time.monotonic()
    delete_model(cluster.session, model)
    assert time.monotonic() - began < 10.0
    assert cluster.replicas(model) == []
    assert is_gone(status.engine_pid)


def test_a_replica_waits_for_a_device_that_another_holds_and_can_be_deleted_meanwhile(cluster, model):
    cluster.deploy(model, ("stub-0",))
    cluster.wait_replicas(model, all_ready(1))
    waits, gives_up = f"{model}-waits", f"{model}-gives-up"
    for other in (waits, gives_up):
        cluster.deploy(other, ("stub-0",))
        cluster.wait_replicas(other, lambda seen: seen and seen[0].phase == "taking devices")
    began = time.monotonic()
    delete_model(cluster.session, gives_up)
    assert time.monotonic() - began < 10.0
    delete_model(cluster.session, model)
    (status,) = cluster.wait_replicas(waits, all_ready(1))
    assert status.devices == ("stub-0",)
    delete_model(cluster.session, waits)
