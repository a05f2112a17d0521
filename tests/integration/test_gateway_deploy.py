"""The gateway on a real cluster: fed with tables, kept alive, independent of the scheduler's life."""

import socket
import threading
import time
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from local_cluster import PATIENCE_S, is_gone, kill_scheduler, local_cluster, ray, scheduler_pids, wait_for

from hetero_llm.cluster.deploy import delete_model
from hetero_llm.errors import ClusterStartFailed
from hetero_llm.gateway.deploy import delete_gateway, deploy_gateway
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import ReplicaState

pytestmark = pytest.mark.ray

MODEL = "m"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as running:
        yield running


@pytest.fixture(scope="module")
def served(cluster):
    """A model with one replica behind a gateway; returns the gateway's base URL."""
    cluster.deploy(MODEL, ("stub-0",))
    url = deploy_gateway(cluster.session, GatewayOptions(port=free_port()))
    cluster.wait_replicas(MODEL, lambda seen: [one.state for one in seen] == [ReplicaState.READY])
    wait_for(lambda: ask(url) == 200)
    return url


def ask(url, path="/v1/completions"):
    """Return the status of a completion, 0 when nobody answers."""
    try:
        return httpx.post(
            f"{url}{path}", json={"model": MODEL, "prompt": "x", "max_tokens": 1}, timeout=20.0
        ).status_code
    except httpx.TransportError:
        return 0


def child_of(url):
    """Return the process that listens where the gateway answers."""
    port = urlsplit(url).port
    (found,) = [
        psutil.Process(c.pid)
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    return found


def test_a_port_that_is_taken_is_an_error_and_leaves_no_gateway(cluster):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ClusterStartFailed, match=f"does not listen on 127.0.0.1:{port}") as failed:
            deploy_gateway(cluster.session, GatewayOptions(port=port))
    assert failed.value.report.cause == f"port {port} on 127.0.0.1 is in use by another process"
    assert "choose another --port" in failed.value.report.next


def test_a_request_reaches_the_replica_and_says_who_answered(cluster, served):
    answer = httpx.post(f"{served}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "xx"
    assert answer.headers["x-hetero-replica"] == cluster.replicas(MODEL)[0].replica


def test_a_gateway_that_runs_already_is_kept(cluster, served):
    assert deploy_gateway(cluster.session, GatewayOptions(port=free_port())) == served


def test_the_child_knows_nothing_of_the_cluster(served):
    child = child_of(served)
    assert not [name for name in child.environ() if name.startswith("RAY_")]
    libraries = {mapped.path for mapped in child.memory_maps()}
    assert not [path for path in libraries if "/ray/" in path or "/torch/" in path]
    assert child.memory_info().rss < 120 << 20


def test_requests_are_answered_while_the_scheduler_is_away(cluster, served):
    statuses, stop = [], threading.Event()

    def keep_asking():
        while not stop.is_set():
            statuses.append(ask(served))
            time.sleep(0.02)

    asking = threading.Thread(target=keep_asking)
    asking.start()
    pid = kill_scheduler(cluster.session)
    wait_for(lambda: is_gone(pid) and len(scheduler_pids(cluster.session)) == 1)
    time.sleep(1.5)  # until the first table of the new one has come
    stop.set()
    asking.join()
    assert set(statuses) == {200}
    assert len(statuses) > 20


def test_a_gateway_follows_the_tables_of_a_restarted_scheduler(cluster, served):
    kill_scheduler(cluster.session)
    wait_for(lambda: len(answering_schedulers(cluster)) == 1)
    cluster.deploy("late", ("stub-1",))
    cluster.wait_replicas("late", lambda seen: [one.state for one in seen] == [ReplicaState.READY])
    wait_for(lambda: [card["id"] for card in httpx.get(f"{served}/v1/models").json()["data"]] == ["late", MODEL])
    delete_model(cluster.session, "late")
    wait_for(lambda: [card["id"] for card in httpx.get(f"{served}/v1/models").json()["data"]] == [MODEL])


def answering_schedulers(cluster):
    try:
        cluster.table()
    except ray.exceptions.RayActorError:
        return []
    return scheduler_pids(cluster.session)


@pytest.mark.parametrize("victim", ["child", "actor"])
def test_a_killed_gateway_comes_back_at_the_same_address(cluster, served, victim):
    child = child_of(served)
    actor = child.parent().parent()
    assert "GatewayReplica" in actor.cmdline()[0]
    (child if victim == "child" else actor).kill()
    wait_for(lambda: is_gone(child.pid) and is_gone(actor.pid), deadline_s=5.0)
    wait_for(lambda: ask(served) == 200)
    assert child_of(served).pid != child.pid


def test_a_replica_that_comes_back_gets_requests_without_anything_being_restarted(cluster, served):
    (first,) = cluster.replicas(MODEL)
    gateway = child_of(served).pid
    psutil.Process(first.actor_pid).kill()
    wait_for(lambda: is_gone(first.engine_pid))
    statuses = [ask(served)]
    wait_for(lambda: statuses.append(ask(served)) or statuses[-1] == 200)
    assert set(statuses[:-1]) == {503}
    wait_for(lambda: first.replica not in {target.replica for target in cluster.table().targets}, PATIENCE_S)
    assert child_of(served).pid == gateway


def test_a_deleted_gateway_frees_its_port_and_can_be_started_again(cluster, served):
    child = child_of(served)
    delete_gateway(cluster.session)
    assert is_gone(child.pid)
    again = deploy_gateway(cluster.session, GatewayOptions(port=urlsplit(served).port))
    assert again == served
    wait_for(lambda: ask(again) == 200)
