"""What ray_private.py promises of Ray's private parts, held against a real cluster."""

import contextlib
import time

import psutil
import pytest
from local_cluster import PATIENCE_S, is_gone, local_cluster, ray, wait_for

from hetero_llm.cluster.ray_private import bind_serve_rpc, death_of, forget_serve, kv_get, kv_put

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def cluster():
    with local_cluster() as running:
        yield running


class Listener:
    """A Serve replica that does what ours do first."""

    def __init__(self):
        bind_serve_rpc(ray.util.get_node_ip_address())


class Sleeper:
    def pid(self):
        import os

        return os.getpid()


def listeners(box):
    """Return the local addresses that the cluster's processes listen on."""
    found = set()
    for process in box.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    # What gRPC binds to 127.0.0.1 is shown as an IPv4 address within IPv6.
    return {ip.removeprefix("::ffff:") for ip in found}


def test_a_cluster_with_a_serve_replica_listens_on_loopback_only(cluster):
    from ray import serve

    from hetero_llm.cluster.applications import start_serve

    start_serve()
    deployment = serve.deployment(Listener, ray_actor_options={"num_cpus": 0})
    serve.run(deployment.bind(), name="listener", route_prefix=None)
    assert len(cluster.box.processes()) >= 5
    assert listeners(cluster.box) == {"127.0.0.1"}
    serve.delete("listener")


def test_no_dashboard_server_is_started(cluster):
    commands = [" ".join(process.cmdline()) for process in cluster.box.processes()]
    assert any("gcs_server" in command for command in commands)
    assert not [command for command in commands if "dashboard.py" in command]


def test_actors_and_so_engines_do_not_run_at_lower_priority(cluster):
    actor = ray.remote(Sleeper).options(num_cpus=0).remote()
    assert psutil.Process(ray.get(actor.pid.remote())).nice() == psutil.Process().nice()
    ray.kill(actor)


def test_an_actor_is_not_dead_before_it_is_killed_and_is_soon_afterwards(cluster):
    actor = ray.remote(Sleeper).options(num_cpus=0).remote()
    pid = ray.get(actor.pid.remote())
    assert death_of(actor._actor_id.hex()) is None
    psutil.Process(pid).kill()
    wait_for(lambda: death_of(actor._actor_id.hex()), deadline_s=5.0)
    assert "\n" not in death_of(actor._actor_id.hex())
    assert is_gone(pid)


def test_an_actor_that_ended_by_order_is_dead(cluster):
    actor = ray.remote(Sleeper).options(num_cpus=0).remote()
    ray.get(actor.pid.remote())
    ray.kill(actor)
    wait_for(lambda: death_of(actor._actor_id.hex()), deadline_s=5.0)


def test_an_actor_nobody_has_heard_of_is_dead(cluster):
    assert death_of("ab" * 16) == "its actor died"


def test_the_key_value_store_gives_back_what_was_put(cluster):
    kv_put("test", "key", b"\x00first")
    kv_put("test", "key", b"\x00second")
    assert kv_get("test", "key") == b"\x00second"
    assert kv_get("other", "key") is None
    assert kv_get("test", "other") is None


def test_errors_of_other_processes_are_not_printed_here(cluster, capfd):
    @ray.remote(num_cpus=0, max_retries=0)
    def dies():
        import os

        os._exit(3)

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(dies.remote(), timeout=PATIENCE_S)
    time.sleep(1.0)  # published by the raylet, printed by a thread of this process
    assert capfd.readouterr() == ("", "")


def test_serve_forgets_a_cluster_that_is_left(cluster):
    from ray.serve import context

    context._set_global_client(object())
    forget_serve()
    assert context._global_client is None
