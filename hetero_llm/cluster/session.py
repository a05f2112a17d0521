"""A connection to a Ray cluster: a local one that is started and ended here, or one that runs already."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import psutil

from hetero_llm.cluster import lease, state
from hetero_llm.cluster.address import check_reachable, check_welcome, make_token, nobody_listens, use_token, where
from hetero_llm.cluster.names import GATEWAY_APP, NAMESPACE
from hetero_llm.cluster.raylet import FOLDER_ENV, OBJECT_STORE_BYTES, Raylet, RayletSpec, end_all
from hetero_llm.errors import ClusterStartFailed, ClusterUnreachable, HeteroError, NotRunning
from hetero_llm.model import Inventory, NodeInventory, RoutingTable
from hetero_llm.scheduler.resources import explicit_resources, node_labels

LOOPBACK = "127.0.0.1"
"""A local cluster listens here only: nothing of it can be reached from outside the machine."""

SCHEDULER_AWAY_S = 30.0
"""Time a scheduler that was killed gets to be there again; it takes a second or two."""

RETRY_S = 0.2

LOOK_S = 3.0
"""How often it is looked whether there still is a cluster, while an answer is waited for."""

END_DEADLINE_S = 30.0
"""Time the applications of a cluster get to end before the cluster itself is ended."""


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
    _raylets: list[Raylet] = field(default_factory=list)
    _closed: bool = False
    _answers: bool = True

    def ask(self, question: str, *words: Any, wait_s: float = 0.0, away_s: float = SCHEDULER_AWAY_S) -> Any:
        """Return what the scheduler answers to one of its methods; one that is being started again is waited for.

        Args:
            wait_s: time the answer may take by intention.
            away_s: how long a scheduler that is away is waited for.

        Raises:
            ClusterUnreachable: it does not come back, or the cluster is gone. Ray would wait a minute for one that
                is gone and then end this process.
        """
        import ray

        method, give_up = getattr(self.scheduler, question), time.monotonic() + away_s + wait_s
        answer = method.remote(*words)
        while True:
            try:
                return ray.get(answer, timeout=LOOK_S)
            except ray.exceptions.GetTimeoutError as error:
                if nobody_listens(self.address) or time.monotonic() > give_up:
                    raise self._lost("no answer") from error
            except ray.exceptions.RayActorError as error:
                if nobody_listens(self.address) or time.monotonic() > give_up:
                    raise self._lost(_reason(error)) from error
                time.sleep(RETRY_S)
                answer = method.remote(*words)

    def _lost(self, cause: str) -> ClusterUnreachable:
        self._answers = False
        gone = nobody_listens(self.address)
        return ClusterUnreachable(
            f"the cluster at {self.address} is gone" if gone else f"the scheduler at {self.address} does not answer",
            cause="nothing listens there any more" if gone else cause,
            next=("hetero-llm node list",) if gone else ("hetero-llm doctor --node all",),
        )

    def inventory(self) -> Inventory:
        """Return the cluster's nodes; `held_by` says which replica holds a device now."""
        from hetero_llm.cluster.nodes import with_holders

        inventory = msgspec.json.decode(self.ask("inventory"), type=Inventory)
        table = self.ask("table", -1, 10.0)
        replicas = msgspec.json.decode(table, type=RoutingTable).replicas if table else ()
        return Inventory(nodes=with_holders(inventory.nodes, replicas))

    def end_idle_gateway(self) -> None:
        """End the gateway when no model is left that it could serve, so that its port is free for the next one."""
        from ray import serve

        table = self.ask("table", -1, 10.0)
        quiet_ray()
        if table and not msgspec.json.decode(table)["models"] and GATEWAY_APP in serve.status().applications:
            serve.delete(GATEWAY_APP)

    def close(self) -> None:
        """Disconnect, and end the cluster if it was started here: nothing of it is left. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if not self.started_here:
            detach()
            return
        try:
            # Else Serve does not answer either, and would be waited for without end.
            if self._answers and not nobody_listens(self.address):
                self._end_applications()
        finally:
            end_all(self._raylets)
            detach()
            end_leftovers(self.temp_dir)

    def _end_applications(self) -> None:
        # Not serve.shutdown(): it kills its controller with calls pending, and Ray prints that as errors.
        from ray import serve

        quiet_ray()
        try:
            self.ask("leave_models", away_s=LOOK_S)
        except ClusterUnreachable:
            return  # Serve does not answer either: whoever stopped this process stopped Ray's along, as systemd does
        apps = serve.status().applications
        if GATEWAY_APP in apps:
            serve.delete(GATEWAY_APP)  # first, so that clients leave before their engines do
        for app in apps:
            serve.delete(app, _blocking=False)
        give_up = time.monotonic() + END_DEADLINE_S
        # What is left then ends with Ray's own processes.
        while serve.status().applications and time.monotonic() < give_up:
            time.sleep(0.1)


def start_local(
    inventories: Sequence[NodeInventory],
    native: Mapping[str, str | None],
    environs: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Session:
    """Start a Ray cluster on this machine, one Ray node per kind, and register their devices as resources.

    Args:
        inventories: this machine's nodes, one per kind; the first becomes the head.
        native: kind → Ray resource that hands out its device ids, None where devices are leased.
        environs: kind → variables of its raylet, from `hetero_llm.scheduler.resources.raylet_environ`.

    Raises:
        ClusterStartFailed: Ray did not come up.
    """
    temp_dir = tempfile.mkdtemp(prefix=state.RAY_DIR_PREFIX)
    make_token(Path(temp_dir) / "token")
    use_token(Path(temp_dir) / "token")
    import ray

    from hetero_llm.cluster.nodes import publish_node

    raylets: list[Raylet] = []
    try:
        with _environment(environs.get(inventories[0].kind, {}) if inventories else {}):
            ray_ids = [_start_head(inventories[:1], native, temp_dir)]
        address = ray.get_runtime_context().gcs_address
        # Appended one by one: what was started is ended with the rest when a later one fails.
        for node in inventories[1:]:
            environ = {**os.environ, **environs.get(node.kind, {})}
            raylets.append(Raylet(_raylet_spec(node, native, temp_dir, address), environ))
        session = Session(address, temp_dir, True, _scheduler(), raylets)
        ray_ids += [raylet.wait_started().ray_node_id for raylet in raylets]
        quiet_ray()
        for node, ray_id in zip(inventories, ray_ids, strict=False):
            publish_node(replace(node, address=LOOPBACK, ray_node_id=ray_id))
    except BaseException as error:
        end_all(raylets)
        ray.shutdown()
        end_leftovers(temp_dir)
        if not isinstance(error, Exception) or isinstance(error, HeteroError):
            raise
        raise ClusterStartFailed(
            "the local Ray cluster did not start", cause=_reason(error), next=("hetero-llm doctor",)
        ) from error
    return session


def _start_head(head: Sequence[NodeInventory], native: Mapping[str, str | None], temp_dir: str) -> str:
    """Start a cluster with this process as its driver; return the head's Ray id."""
    import ray

    from hetero_llm.cluster.ray_private import loopback_kept, reread_authentication, without_dashboard

    resources = explicit_resources(head, native)
    reread_authentication()
    with loopback_kept(), without_dashboard(), _signals_kept():
        ray.init(
            address="local",
            # Explicit, zero included: Ray's own detection picks one vendor at random on mixed boxes.
            num_gpus=int(resources.pop("GPU", 0)),
            resources=resources,
            labels={name: value for node in head for name, value in node_labels(node).items()},
            namespace=NAMESPACE,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=temp_dir,
            _node_ip_address=LOOPBACK,
        )
    ray_id: str = ray.get_runtime_context().get_node_id()
    return ray_id


def _raylet_spec(node: NodeInventory, native: Mapping[str, str | None], temp_dir: str, address: str) -> RayletSpec:
    return RayletSpec(
        name=node.node,
        address=address,
        ip=LOOPBACK,
        folder=str(Path(temp_dir) / node.kind),
        resources=explicit_resources([node], native),
        labels=node_labels(node),
    )


def connect(address: str | None = None) -> Session:
    """Connect to a running cluster: `address`, else ``RAY_ADDRESS``, else the one `serve` of this machine.

    Raises:
        NotRunning: no address is known, or the cluster was not started by hetero-llm.
        ClusterUnreachable: nothing answers there, or the token is refused.
    """
    place = where(address)
    if place.token:
        use_token(place.token)
    attach(place.address)
    from hetero_llm.cluster.controller import find_scheduler

    try:
        return Session(place.address, place.temp_dir, False, find_scheduler())
    except ValueError:
        detach()
        raise NotRunning(
            f"the cluster at {place.address} runs no hetero-llm scheduler",
            next=("on its head: hetero-llm node start --head",),
        ) from None


def attach(address: str) -> None:
    """Make this process a driver of the cluster at `address`, with the token that was chosen by `use_token`.

    Raises:
        ClusterUnreachable: nothing answers there, the token is refused, or no node of the cluster is on this machine.
    """
    check_reachable(address)
    import ray

    from hetero_llm.cluster.ray_private import loopback_kept, reread_authentication

    reread_authentication()
    try:
        check_welcome(address)
        with loopback_kept(), _signals_kept():
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        ray.shutdown()
        raise ClusterUnreachable(
            f"no cluster answers at {address}",
            cause=_reason(error),
            next=("hetero-llm serve", "check --address and RAY_ADDRESS", "check RAY_AUTH_TOKEN_PATH"),
        ) from error
    quiet_ray()


def detach() -> None:
    """Leave the cluster this process is a driver of; nothing happens when it is of none."""
    import ray

    from hetero_llm.cluster.ray_private import forget_serve

    forget_serve()
    ray.shutdown()


def _reason(error: Exception) -> str:
    """Return the line of a Ray error that says why: its last ``SomeError: text``, else its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception): ", line)), lines[0])


def _scheduler() -> Any:
    from hetero_llm.cluster.controller import start_scheduler

    return start_scheduler()


def end_leftovers(temp_dir: str | None) -> None:
    """Kill what still runs of our own cluster and remove its files. Ray ends its processes; this is for the rest."""
    if temp_dir is None:
        return
    import ray

    package = str(Path(ray.__file__).parent)
    ours = [process for process in psutil.process_iter(["cmdline"]) if _is_of(process, temp_dir, package)]
    for process in ours:
        process.kill()
    psutil.wait_procs(ours, timeout=5.0)
    shutil.rmtree(temp_dir, ignore_errors=True)
    lease.sweep()


def _is_of(process: psutil.Process, temp_dir: str, package: str) -> bool:
    command = " ".join(process.info["cmdline"] or ())
    if not command.startswith("ray::"):
        # Both: an editor with one of the cluster's logs open is none of ours.
        return temp_dir in command and package in command
    try:
        environ = process.environ()
    except psutil.Error:
        return False
    return any(environ.get(name, "").startswith(f"{temp_dir}/") for name in (FOLDER_ENV, "RAY_AUTH_TOKEN_PATH"))


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Let what is started meanwhile see `changes`; this process itself is of no kind."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
