"""The private parts of Ray 2.60 we lean on, all in this file. Look here first when Ray's version moves.

Each entry says what the public API lacks. tests/integration/test_ray_private.py holds each to its promise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray._private import services
from ray.experimental import internal_kv

from hetero_llm.cluster.names import HEAD_RESOURCE

_METADATA_NAMESPACE = b"cluster"


@contextmanager
def loopback_kept() -> Iterator[None]:
    """Let Ray keep 127.0.0.1 as a node's address; it then binds the ports of a cluster to loopback only.

    `ray.init` and `ray start` replace a loopback address by the machine's own, and have no option against it.
    """
    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda address: address
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


@contextmanager
def without_dashboard() -> Iterator[None]:
    """Let `ray.init` start a head without Ray's dashboard server: seconds of start-up and 130 MB nobody here uses.

    `include_dashboard=False` starts the server all the same, only with fewer pages, and waits for it.
    """
    original = services.start_api_server
    services.start_api_server = lambda *_arguments, **_options: (None, None)
    try:
        yield
    finally:
        services.start_api_server = original


def bind_serve_rpc(address: str) -> None:
    """Make this Serve replica's internal RPC server listen on `address` only.

    Serve binds it to every interface, without a token, although nothing of ours calls it. Call in a replica's
    constructor: Serve starts the server when the constructor has returned.
    """
    from ray._common.tls_utils import add_port_to_grpc_server
    from ray.serve._private import replica

    def bind(server: Any, _anywhere: str) -> Any:
        return add_port_to_grpc_server(server, f"{address}:0")

    replica.add_port_to_grpc_server = bind


def with_version(deployment: Any, version: str) -> Any:
    """Return a Serve deployment whose replicas are replaced only when `version` changes.

    Left to itself Serve takes a new version at each `serve.run`, which would restart every replica of an application
    whose number of replicas is all that changes.
    """
    return deployment.options(version=version, _internal=True)


def kill_unplaced_replicas(app: str) -> None:
    """Kill replica actors of a Serve application that no node has taken yet.

    Serve asks every replica that is to leave to end by itself, also one that was never started, and waits for the
    whole graceful time. It takes what is killed for ended.
    """
    for actor in ray._private.state.actors().values():
        if actor["Name"].startswith(f"SERVE_REPLICA::{app}#") and actor["State"] == "PENDING_CREATION":
            with suppress(ValueError):  # it was taken, or ended, meanwhile
                ray.kill(ray.get_actor(actor["Name"], namespace="serve"))


def silence_driver() -> None:
    """Keep Ray from printing other processes' errors into this command's output; we report them by other ways.

    `log_to_driver=False` covers the output of workers, not the errors that raylets publish.
    """
    from ray._private import worker

    worker.print_to_stdstream = lambda *_arguments, **_options: None


def reread_authentication() -> None:
    """Make Ray read its authentication mode and token anew at the next connection.

    It keeps the mode of the moment of its import and the first token for the life of the process, whatever
    ``RAY_AUTH_MODE`` and ``RAY_AUTH_TOKEN_PATH`` say later. A process that had imported Ray before this package, or
    that speaks to one cluster after the other, would be refused.
    """
    # In this order: a thread that asks in between must not look for a token of the old mode.
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


def forget_serve() -> None:
    """Drop Serve's handle of its controller, which it keeps after `ray.shutdown` and would use in the next cluster.

    `serve.shutdown` drops it too, but ends everybody's applications.
    """
    if "ray.serve" in sys.modules:
        from ray.serve import context

        context._set_global_client(None)


def refusal(address: str, timeout_s: float) -> str | None:
    """Return why the cluster at `address` (``host:port``) does not let us in, None when it does.

    `ray.init` finds out only after 20 s for a wrong token, minutes for a listener that is not Ray, and prints every
    attempt. The question is the one it asks first itself.
    """
    import grpc  # type: ignore[import-untyped]
    from ray._private.grpc_utils import init_grpc_channel
    from ray.core.generated import gcs_service_pb2, gcs_service_pb2_grpc

    channel = init_grpc_channel(address)
    try:
        service = gcs_service_pb2_grpc.NodeInfoGcsServiceStub(channel)
        service.GetClusterId(gcs_service_pb2.GetClusterIdRequest(), timeout=timeout_s, wait_for_ready=True)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return "the cluster refuses the token"
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"what listens there does not answer like Ray within {timeout_s:g} s"
        return f"{error.code().name}: {error.details()}"
    finally:
        channel.close()
    return None


def death_of(actor_id: str) -> str | None:
    """Return why an actor is dead, or None while Ray believes it alive.

    The public way (`ray.util.state`) needs the dashboard; a handle would import the actor's class with all of Serve.
    """
    info = ray._private.state.actors(actor_id)
    if info and info["State"] != "DEAD":
        return None
    cause = info["DeathCause"].actor_died_error_context.error_message if info else ""
    return cause.strip().splitlines()[0] if cause.strip() else "its actor died"


def kv_put(namespace: str, key: str, value: bytes) -> None:
    """Store bytes in the cluster's key-value store, which outlives every actor."""
    internal_kv._internal_kv_put(key.encode(), value, namespace=namespace.encode())


def kv_put_at(address: str, namespace: str, key: str, value: bytes) -> None:
    """Store bytes in the key-value store of the cluster at `address`, without becoming a driver of it.

    Raises:
        ray.exceptions.RaySystemError: the cluster does not answer.
    """
    client = ray._raylet.GcsClient(address=address)
    client.internal_kv_put(key.encode(), value, True, namespace.encode(), timeout=10.0)


def kv_get_at(address: str, namespace: str, key: str) -> bytes | None:
    """Return bytes stored in the cluster at `address`, or None; as `kv_put_at`."""
    client = ray._raylet.GcsClient(address=address)
    value: bytes | None = client.internal_kv_get(key.encode(), namespace.encode(), timeout=10.0)
    return value


def kv_get(namespace: str, key: str) -> bytes | None:
    """Return bytes stored by `kv_put`, or None."""
    value: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=namespace.encode())
    return value


def kv_delete(namespace: str, key: str) -> None:
    """Remove what `kv_put` stored; nothing happens when it is not there."""
    internal_kv._internal_kv_del(key.encode(), namespace=namespace.encode())


def kv_list(namespace: str) -> tuple[str, ...]:
    """Return the keys of a namespace."""
    return tuple(key.decode() for key in internal_kv._internal_kv_list(b"", namespace=namespace.encode()))


def cluster_versions(address: str, timeout_s: float) -> tuple[str, str] | None:
    """Return Ray's and Python's version of the cluster at `address`, None when it does not say.

    Ray compares them too, but only when half a node is up, and its message names neither side's way out.
    """
    from ray._common.usage import usage_constants

    client = ray._raylet.GcsClient(address=address)
    metadata = client.internal_kv_get(
        usage_constants.CLUSTER_METADATA_KEY, namespace=_METADATA_NAMESPACE, timeout=timeout_s
    )
    if metadata is None:
        return None
    known = json.loads(metadata)
    return known["ray_version"], known["python_version"]


class NodeProcesses:
    """Ray's processes of one node, as children of this process: they die with it, however it dies.

    Unlike `ray start`: loopback is kept, there is no dashboard, no log monitor, no autoscaler and no fixed port besides
    the head's, so that several nodes fit on one machine; and nothing is written outside `folder`.
    """

    def __init__(
        self,
        *,
        name: str,
        address: str | None,
        port: int,
        ip: str,
        folder: str,
        resources: Mapping[str, float],
        labels: Mapping[str, str],
        object_store_bytes: int,
    ):
        """Start them; returns when the node is registered.

        Args:
            name: shown by Ray's own tools.
            address: the cluster to join; None starts a new one.
            port: where a new cluster listens; 0 for any free port.
            ip: the node's address.
            folder: for sockets and logs; short, because the paths of Unix sockets are limited to 107 bytes.
            resources: whole numbers; ``GPU`` among them.
            labels: node labels.
            object_store_bytes: size of the node's object store.
        """
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        custom = dict(resources)
        gpus = int(custom.pop("GPU", 0))
        options: dict[str, Any] = {"gcs_address": address} if address else {"gcs_server_port": port}
        parameters = RayParams(
            **options,
            num_gpus=gpus,
            resources=custom,
            labels=dict(labels),
            object_store_memory=object_store_bytes,
            node_ip_address=ip,
            node_name=name,
            temp_dir=folder,
            plasma_store_socket_name=f"{folder}/plasma",
            raylet_socket_name=f"{folder}/raylet",
            include_dashboard=False,
            dashboard_agent_listen_port=0,
            include_log_monitor=False,
            no_monitor=True,
        )
        with loopback_kept(), without_dashboard():
            # The reaper stands for fate sharing: the kernel kills the children when this process is gone.
            self._node = Node(parameters, head=address is None, shutdown_at_exit=False, spawn_reaper=True)

    @property
    def ray_node_id(self) -> str:
        """Ray's id of the node."""
        node_id: str = self._node.node_id
        return node_id

    @property
    def address(self) -> str:
        """``host:port`` of the cluster."""
        address: str = self._node.gcs_address
        return address

    def dead(self) -> tuple[str, ...]:
        """Return the names of those that ended by themselves; the node is of no use then."""
        return tuple(str(name) for name, _ in self._node.dead_processes())

    def end(self) -> None:
        """Take the node out of the cluster and end its processes and workers."""
        self._node.kill_all_processes(check_alive=False, allow_graceful=True)


def drain_node(ray_node_id: str, why: str) -> None:
    """Tell Ray that a node will leave: nothing new is placed there, and Serve moves its replicas to other nodes first.

    There is no way back but to end the node and start it anew.

    Raises:
        RuntimeError: Ray refuses.
    """
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    # Of the two reasons Ray knows, "idle" is refused while the node has work.
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, refusal_text = client.drain_node(ray_node_id, reason, why, 0)
    if not accepted:
        raise RuntimeError(refusal_text)


def head_id() -> str:
    """Return Ray's id of the living head node."""
    return next(str(node["NodeID"]) for node in ray.nodes() if node["Alive"] and HEAD_RESOURCE in node["Resources"])


def draining_nodes() -> frozenset[str]:
    """Return Ray's ids of the nodes that are told to leave."""
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
    return frozenset(client.get_draining_nodes())
