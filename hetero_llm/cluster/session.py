"""A connection to a Ray cluster: a local one that is started and ended here, or one that runs already."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import psutil

from hetero_llm.cluster import lease, state
from hetero_llm.cluster.names import GATEWAY_APP, NAMESPACE
from hetero_llm.errors import ClusterStartFailed, ClusterUnreachable, NotRunning
from hetero_llm.model import Inventory, NodeInventory, ReplicaState
from hetero_llm.scheduler.resources import explicit_resources, node_labels

LOOPBACK = "127.0.0.1"
"""A local cluster listens here only: nothing of it can be reached from outside the machine."""

CONNECT_DEADLINE_S = 5.0
"""Time for a cluster to accept a TCP connection."""

END_DEADLINE_S = 30.0
"""Time the applications of a cluster get to end before the cluster itself is ended."""

OBJECT_STORE_BYTES = 80 << 20
"""Smallest object store Ray takes is 75 MiB. No model data goes through it."""


@dataclass
class Session:
    """A connection to a cluster. Close it; closing a session that started its cluster ends the cluster.

    Attributes:
        address: where others connect to the cluster.
        temp_dir: Ray's temporary folder when it is on this machine; holds the token.
        started_here: the cluster ends with this session.
        scheduler: handle of the scheduler actor.
    """

    address: str
    temp_dir: str | None
    started_here: bool
    scheduler: Any
    _closed: bool = False

    def inventory(self) -> Inventory:
        """Return the cluster's nodes; `held_by` says which replica holds a device now."""
        import ray

        inventory = msgspec.json.decode(ray.get(self.scheduler.inventory.remote()), type=Inventory)
        table = ray.get(self.scheduler.table.remote(-1, 10.0))
        replicas = msgspec.json.decode(table)["replicas"] if table else []
        gone = (ReplicaState.FAILED, ReplicaState.STOPPED)
        held = {uid: r["replica"] for r in replicas if r["state"] not in gone for uid in r["devices"]}
        nodes = tuple(
            replace(node, devices=tuple(replace(d, held_by=held.get(d.uid, d.held_by)) for d in node.devices))
            for node in inventory.nodes
        )
        return Inventory(nodes=nodes)

    def close(self) -> None:
        """Disconnect, and end the cluster if it was started here: nothing of it is left. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        import ray

        from hetero_llm.cluster.ray_private import forget_serve

        if not self.started_here:
            forget_serve()
            ray.shutdown()
            return
        try:
            self._end_applications()
        finally:
            forget_serve()
            ray.shutdown()
            _end_leftovers(self.temp_dir)

    def _end_applications(self) -> None:
        # Not serve.shutdown(): it kills its controller with calls pending, and Ray prints that as errors.
        from ray import serve

        quiet_ray()

        apps = serve.status().applications
        if GATEWAY_APP in apps:
            serve.delete(GATEWAY_APP)  # first, so that clients leave before their engines do
        for app in apps:
            serve.delete(app, _blocking=False)
        give_up = time.monotonic() + END_DEADLINE_S
        # What is left then ends with Ray's own processes.
        while serve.status().applications and time.monotonic() < give_up:
            time.sleep(0.1)


def start_local(inventories: Sequence[NodeInventory], native: Mapping[str, str | None]) -> Session:
    """Start a Ray cluster on this machine and register its devices as resources.

    Args:
        inventories: this machine's nodes, one per kind.
        native: kind → Ray resource that hands out its device ids, None where devices are leased.

    Raises:
        ClusterStartFailed: Ray did not come up.
    """
    temp_dir = tempfile.mkdtemp(prefix=state.RAY_DIR_PREFIX)
    _use_token(temp_dir, create=True)
    resources = explicit_resources(inventories, native)
    num_gpus = int(resources.pop("GPU", 0))
    labels = {name: value for node in inventories for name, value in node_labels(node).items()}
    import ray

    from hetero_llm.cluster.nodes import publish_node
    from hetero_llm.cluster.ray_private import loopback_kept, reread_authentication, without_dashboard

    reread_authentication()
    try:
        with loopback_kept(), without_dashboard(), _signals_kept():
            ray.init(
                address="local",
                # Explicit, zero included: Ray's own detection picks one vendor at random on mixed boxes.
                num_gpus=num_gpus,
                resources=resources,
                labels=labels,
                namespace=NAMESPACE,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=temp_dir,
                _node_ip_address=LOOPBACK,
            )
            session = Session(ray.get_runtime_context().gcs_address, temp_dir, True, _scheduler())
    except BaseException as error:
        ray.shutdown()
        _end_leftovers(temp_dir)
        if not isinstance(error, Exception):
            raise
        raise ClusterStartFailed(
            "the local Ray cluster did not start", cause=_reason(error), next=("hetero-llm doctor",)
        ) from error
    quiet_ray()
    ray_id = ray.get_runtime_context().get_node_id()
    for node in inventories:
        publish_node(replace(node, address=LOOPBACK, ray_node_id=ray_id))
    return session


def connect(address: str | None = None) -> Session:
    """Connect to a running cluster: `address`, else ``RAY_ADDRESS``, else the one `serve` of this machine.

    Raises:
        NotRunning: no address is known, or the cluster was not started by hetero-llm.
        ClusterUnreachable: nothing answers there, or the token is refused.
    """
    address, temp_dir = _where(address)
    if temp_dir:
        _use_token(temp_dir, create=False)
    _check_reachable(address)
    import ray

    from hetero_llm.cluster.ray_private import loopback_kept, reread_authentication

    reread_authentication()
    try:
        _check_welcome(address)
        with loopback_kept(), _signals_kept():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()
        raise ClusterUnreachable(
            f"no cluster answers at {address}",
            cause=_reason(error),
            next=("hetero-llm serve", "check --address and RAY_ADDRESS", "check RAY_AUTH_TOKEN_PATH"),
        ) from error
    from hetero_llm.cluster.controller import find_scheduler

    quiet_ray()
    try:
        return Session(address, temp_dir, False, find_scheduler())
    except ValueError:
        ray.shutdown()
        raise NotRunning(
            f"the cluster at {address} runs no hetero-llm scheduler", next=(f"hetero-llm serve --address {address}",)
        ) from None


def _check_reachable(address: str) -> None:
    # Ray itself goes on trying for minutes.
    if not _has_port(address):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_DEADLINE_S).close()
    except OSError as error:
        raise ClusterUnreachable(
            f"no cluster answers at {address}",
            cause=str(error),
            next=("hetero-llm serve", "check --address and RAY_ADDRESS"),
        ) from error


def _check_welcome(address: str) -> None:
    from hetero_llm.cluster.ray_private import refusal

    if _has_port(address) and (why := refusal(address, CONNECT_DEADLINE_S)):
        raise ConnectionError(why)


def _has_port(address: str) -> bool:
    """Return whether this is ``host:port``; "auto" and "ray://…" are Ray's to resolve."""
    return "/" not in address and address.rpartition(":")[2].isdecimal()


def _reason(error: Exception) -> str:
    """Return the line of a Ray error that says why: its last ``SomeError: text``, else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[0])


def _where(address: str | None) -> tuple[str, str | None]:
    records = tuple(record for record in state.live_records() if record.address)
    wanted = address or os.environ.get("RAY_ADDRESS")
    if wanted:
        return wanted, next((record.temp_dir for record in records if record.address == wanted), None)
    if not records:
        raise NotRunning("nothing is being served from this machine", next=("hetero-llm serve",))
    if len(records) > 1:
        choices = tuple(f"--address {record.address}   # {', '.join(record.models)}" for record in records)
        raise NotRunning(f"{len(records)} clusters run on this machine; name one", next=choices)
    return records[0].address, records[0].temp_dir


def _scheduler() -> Any:
    from hetero_llm.cluster.controller import start_scheduler

    return start_scheduler()


def _use_token(temp_dir: str, *, create: bool) -> None:
    token = Path(temp_dir) / "token"
    if create:
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def _end_leftovers(temp_dir: str | None) -> None:
    """Kill what still runs of our own cluster and remove its files. Ray ends its processes; this is for the rest."""
    if temp_dir is None:
        return
    import ray

    package = str(Path(ray.__file__).parent)
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    # Both: an editor with one of the cluster's logs open is none of ours.
    ours = [process for process, command in commands if temp_dir in command and package in command]
    for process in ours:
        process.kill()
    psutil.wait_procs(ours, timeout=5.0)
    shutil.rmtree(temp_dir, ignore_errors=True)
    lease.sweep()


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the caller's signal handlers: `ray.init` replaces SIGTERM's."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def quiet_ray() -> None:
    """Keep Ray's own log lines from mixing with what the command prints; errors come as exceptions anyway.

    `import ray.serve` sets its level anew, so call this after that import too.
    """
    from hetero_llm.cluster.ray_private import silence_driver

    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    silence_driver()
