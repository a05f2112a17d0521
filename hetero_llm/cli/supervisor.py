"""The life of one `serve`: plan, start, deploy, wait until ready, watch, and leave nothing behind."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hetero_llm.cli import render
from hetero_llm.cli.machine import local_nodes
from hetero_llm.cli.phases import Display
from hetero_llm.cli.planning import effective_wishes, infeasible, kind_rules, plan_request
from hetero_llm.cli.ready import ReadyInfo
from hetero_llm.cli.requests import ModelRequest
from hetero_llm.cli.signals import StopSignals
from hetero_llm.cluster import state
from hetero_llm.errors import (
    AlreadyRunning,
    ClusterUnreachable,
    EngineNotReady,
    ErrorReport,
    HeteroError,
    UsageError,
    from_report,
)
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import NodeInventory, Plan, ReplicaState, ReplicaStatus, RoutingTable, from_data, to_data
from hetero_llm.scheduler.resources import hold

if TYPE_CHECKING:
    from hetero_llm.cluster.health import HealthWatch
    from hetero_llm.cluster.pools import ModelDeployment
    from hetero_llm.cluster.session import Session
    from hetero_llm.plugin.manager import PluginManager

START_POLL_S = 0.2
WATCH_POLL_S = 1.0
LOST_AFTER_S = 30.0
"""A cluster that does not answer for this long is given up."""
START_GRACE_S = 60.0
"""The replica itself keeps the start deadline and knows the cause; this much later the supervisor does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """One `serve`, checked.

    Attributes:
        name: name of its record, unique on the machine.
        address: cluster to join; None starts a local one.
        started_s: `time.monotonic` when the command began.
        log: where the output goes when detached, None in the foreground.
    """

    name: str
    requests: tuple[ModelRequest, ...]
    gateway: GatewayOptions
    address: str | None
    started_s: float
    log: str | None = None


class StoppedFromOutside(Exception):
    """The last model was deleted by ``stop``: the normal end of a `serve`."""


class Supervisor:
    """Starts what a job asks for and keeps an eye on it. Call `start`, then `watch`; `close` in every case."""

    def __init__(self, job: ServeJob, display: Display, signals: StopSignals):
        self._job = job
        self._display = display
        self._signals = signals
        self._session: Session | None = None
        self._health: HealthWatch | None = None
        self._wanted: dict[str, Plan] = {}
        self._import = threading.Thread(target=importlib.import_module, args=("hetero_llm.gateway.deploy",))
        self._record = state.new_record(job.name, started_unix_s=time.time(), log=job.log)
        state.write_record(self._record)

    def start(self) -> ReadyInfo:
        """Bring everything up and return when each replica has generated a token.

        Raises:
            AlreadyRunning: the cluster serves a model of one of the names.
            HeteroError: the first thing that went wrong, an engine's root cause included.
            StoppedFromOutside: ``stop`` deleted the models meanwhile.
        """
        from hetero_llm.plugin.manager import load_plugins

        # Ray takes two seconds to import; meanwhile the devices are probed and the plan is made.
        self._import.start()
        manager = load_plugins()
        nodes = self._nodes(manager)
        plans = plan_all(self._job.requests, nodes, manager)
        require_servable(plans, nodes, manager)
        self._require_new(plans)
        paths = self._prepare()
        if self._session is None:
            self._start_cluster(nodes, manager)
        url = self._deploy(plans, paths)
        shapes = {name: replicas_text(plan) for name, plan in self._wanted.items()}
        self._record = state.update_record(self._record, url=url, models=tuple(self._wanted), shapes=shapes)
        self._wait_until_ready()
        self._display.close()
        self._record = state.update_record(self._record, ready=True)
        return self._ready_info(url)

    def watch(self) -> None:
        """Tell about replicas and devices that are lost or come back; return when the last model was deleted.

        Raises:
            ClusterUnreachable: the cluster does not answer any more.
        """
        self._watch_devices()
        before, answered_s = self._snapshot(), time.monotonic()
        while before is None or self._served(before):
            time.sleep(WATCH_POLL_S)
            now = self._snapshot()
            if now is not None:
                tell_changes(before, now)
                before, answered_s = now, time.monotonic()
            elif time.monotonic() - answered_s > LOST_AFTER_S:
                raise ClusterUnreachable(f"the cluster has not answered for {LOST_AFTER_S:.0f} s")

    def close(self) -> None:
        """Take down what this job started; of a joined cluster its models, with the last the gateway. Safe twice."""
        self._display.close()
        if self._import.is_alive():
            self._import.join()  # an import that the interpreter's end cuts off complains
        if self._health is not None:
            self._health.stop()
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if not session.started_here:
                self._delete_models(session)
                session.end_idle_gateway()
        finally:
            session.close()

    def end_record(self, error: HeteroError | None) -> None:
        """Remove the record, or leave the error in it for the `serve --detach` that waits."""
        if error is not None and self._job.log is not None:
            state.update_record(self._record, error=to_data(error.report))
        else:
            state.remove_record(self._record.name)

    def _nodes(self, manager: PluginManager) -> tuple[NodeInventory, ...]:
        if self._job.address is None:
            self._display.step("looking for devices")
            return local_nodes(manager)
        from hetero_llm.cluster.session import connect

        self._display.step(f"joining the cluster at {self._job.address}")
        with self._signals.deferred():
            self._session = connect(self._job.address)
        self._record = state.update_record(self._record, address=self._session.address)
        return self._session.inventory().nodes

    def _require_new(self, plans: Sequence[Plan]) -> None:
        """Refuse what the joined cluster serves already: the one would replace the other, and end it when it ends."""
        if self._session is None:
            return
        from hetero_llm.cluster.deploy import snapshot

        served = {entry.name for entry in snapshot(self._session).models}
        for name in sorted(served & {plan.model.name for plan in plans}):
            raise AlreadyRunning(
                f"model {name!r} is served already by the cluster at {self._session.address}",
                next=("hetero-llm status", f"hetero-llm stop {name}", "give this one another name in hetero-llm.yaml"),
            )

    def _prepare(self) -> dict[str, Any]:
        """Make every model's folder ready; return source → folder."""
        from hetero_llm.models.store import resolve

        sources = [request.source for request in self._job.requests]
        return {source: resolve(source, progress=self._display.progress).path for source in sources}

    def _start_cluster(self, nodes: Sequence[NodeInventory], manager: PluginManager) -> None:
        from hetero_llm.cluster.session import start_local
        from hetero_llm.scheduler.resources import raylet_environ

        state.live_records()  # removes what a killed `serve` left behind
        self._display.step("starting a local cluster")
        backends = {backend.kind: backend for backend in manager.backends()}
        native = {kind: backend.native_resource for kind, backend in backends.items()}
        environs = {node.kind: raylet_environ(node, backends[node.kind]) for node in nodes if node.kind in backends}
        self._import.join()
        with self._signals.deferred():
            self._session = start_local(nodes, native, environs)
            self._record = state.update_record(
                self._record, address=self._session.address, temp_dir=self._session.temp_dir
            )

    def _deploy(self, plans: Sequence[Plan], paths: Mapping[str, Any]) -> str:
        from hetero_llm.cluster.deploy import deploy_model
        from hetero_llm.gateway.deploy import deploy_gateway

        assert self._session is not None
        for request, plan in zip(self._job.requests, plans, strict=True):
            self._display.step(f"deploying {plan.model.name}: {replicas_text(plan)}")
            deployment = deployment_of(request, plan, str(paths[request.source]))
            with self._signals.deferred():
                self._wanted[plan.model.name] = plan
                deploy_model(self._session, deployment)
        with self._signals.deferred():
            return deploy_gateway(self._session, self._job.gateway)

    def _watch_devices(self) -> None:
        """Keep the cluster informed of this machine's devices, where no other command of ours does."""
        from hetero_llm.cluster.health import watch_nodes
        from hetero_llm.cluster.nodes import published_nodes

        if self._session is not None and self._session.started_here:
            self._health = watch_nodes(published_nodes().nodes, self._session.address, render.say)

    def _wait_until_ready(self) -> None:
        limit_s = max(request.start_timeout_s for request in self._job.requests) + START_GRACE_S
        give_up_s = time.monotonic() + limit_s
        while True:
            table = self._snapshot()
            if table is not None:
                if not self._served(table):
                    raise StoppedFromOutside
                mine = [status for status in table.replicas if status.model in self._wanted]
                self._display.replicas(mine)
                raise_failure(mine)
                ready = Counter(status.model for status in mine if status.state is ReplicaState.READY)
                if all(ready[name] >= len(plan.replicas) for name, plan in self._wanted.items()):
                    return
            if time.monotonic() > give_up_s:
                raise EngineNotReady(
                    f"not ready after {limit_s:.0f} s", next=("--start-timeout-s N", "hetero-llm logs")
                )
            time.sleep(START_POLL_S)

    def _snapshot(self) -> RoutingTable | None:
        """Return the table, or None when the scheduler is just being restarted."""
        from hetero_llm.cluster.deploy import snapshot

        assert self._session is not None
        try:
            return snapshot(self._session)
        except HeteroError:
            raise
        except Exception:  # noqa: BLE001  (Ray's many types; `watch` gives up when it lasts)
            return None

    def _served(self, table: RoutingTable) -> bool:
        return any(entry.name in self._wanted for entry in table.models)

    def _delete_models(self, session: Session) -> None:
        from hetero_llm.cluster.deploy import delete_model

        for name in self._wanted:
            delete_model(session, name)

    def _ready_info(self, url: str) -> ReadyInfo:
        return ReadyInfo(
            url=url,
            models={name: replicas_text(plan) for name, plan in self._wanted.items()},
            has_keys=bool(self._job.gateway.keys),
            seconds=time.monotonic() - self._job.started_s,
            pid=os.getpid(),
            foreground=self._job.log is None,
        )


def deployment_of(request: ModelRequest, plan: Plan, path: str) -> ModelDeployment:
    """Return what the cluster keeps of a request: its plan, and all that is needed to make it again.

    Args:
        path: folder of the model, ready to be served.
    """
    from hetero_llm.cluster.pools import ModelDeployment

    kinds = {replica.kind for replica in plan.replicas}
    return ModelDeployment(
        name=plan.model.name,
        source=request.source,
        path=path,
        plan=plan,
        wishes=effective_wishes(request),
        engine_args=request.engine_args,
        engine_options={kind: options for kind, options in request.engine_options.items() if kind in kinds},
        gpu_memory_utilization=request.wishes[0].gpu_memory_utilization,
        start_deadline_s=request.start_timeout_s,
    )


def plan_all(
    requests: Sequence[ModelRequest], nodes: Sequence[NodeInventory], manager: PluginManager, *, strict: bool = True
) -> list[Plan]:
    """Plan the models one after the other on the same nodes.

    Args:
        strict: what is planned is about to be served: it must fit and be on this machine. Otherwise the hub is asked
            about models that are not.

    Raises:
        PlanInfeasible: one does not fit, and `strict`.
        UnknownModel, ModelFolderInvalid: as `hetero_llm.models.store.resolve`.
    """
    from hetero_llm.models.store import resolve

    rules, plans = kind_rules(manager), []
    for request in requests:
        facts = resolve(request.source, prepare=False, ask_hub=not strict).facts
        plan = plan_request(request, facts, nodes, rules)
        if strict and not plan.feasible:
            raise infeasible(request, plan)
        plans.append(plan)
        nodes = hold(nodes, plan.replicas)
    return plans


def require_servable(plans: Sequence[Plan], nodes: Sequence[NodeInventory], manager: PluginManager) -> None:
    """Refuse what can be planned but not run, before anything is started.

    Raises:
        UnknownKind: no plugin here serves a planned kind, or provides the engine that is to stand in for its own.
        UsageError: the devices are pretended by an override that names no engine, or one that cannot stand in.
    """
    from hetero_llm.inventory.override import pretended_only

    devices = {device.uid: device for node in nodes for device in node.devices}
    placed = {
        uid for plan in plans for replica in plan.replicas for place in replica.placement for uid in place.devices
    }
    for device in sorted((devices[uid] for uid in placed), key=lambda device: device.uid):
        manager.backend(device.kind)
        if device.stand_in and not manager.backend(device.stand_in).stands_in:
            raise UsageError(
                f"the engine of {device.stand_in} cannot stand in for the one of {device.kind}",
                next=(f"engine=sim in HETERO_LLM_OVERRIDE_{device.kind.upper()}",),
            )
        if pretended_only(device):
            raise UsageError(
                f"the {device.kind} devices are pretended: they can be planned on, not served",
                next=(
                    f"add engine=sim to HETERO_LLM_OVERRIDE_{device.kind.upper()}, or unset it",
                    "hetero-llm plan MODEL",
                ),
            )


def replicas_text(plan: Plan) -> str:
    """Return ``2 x cpu tp=1``, the plan in a few words."""
    shapes = Counter((replica.kind, replica.tp, replica.pp, replica.simulated) for replica in plan.replicas)
    return ", ".join(
        render.marked(f"{count} x {kind} tp={tp}" + (f" pp={pp}" if pp > 1 else ""), simulated)
        for (kind, tp, pp, simulated), count in shapes.items()
    )


def raise_failure(replicas: Sequence[ReplicaStatus]) -> None:
    """Raise the root cause of the first failed replica, if there is one."""
    failed = next((status for status in replicas if status.state is ReplicaState.FAILED), None)
    if failed is not None:
        raise from_report(failure_report(failed))


def failure_report(status: ReplicaStatus) -> ErrorReport:
    """Return why a replica failed, with its log."""
    if status.error is None:
        return ErrorReport("HL501", f"replica {status.replica} failed without saying why", log=status.log)
    report = from_data(dict(status.error), ErrorReport)
    return report if report.log else replace(report, log=status.log)


def tell_changes(before: RoutingTable | None, now: RoutingTable) -> None:
    """Print a line for each replica that was lost or became ready since `before`."""
    old = {status.replica: status for status in before.replicas} if before else {}
    new = {status.replica: status for status in now.replicas}
    for name, status in old.items():
        after = new.get(name)
        if status.state is ReplicaState.READY and (after is None or after.state is ReplicaState.FAILED):
            cause = f": {failure_report(after).message}" if after is not None and after.error else ""
            render.say(f"{time.strftime('%H:%M:%S')} replica {name} was lost{cause}")
    for name, status in new.items():
        was_ready = name in old and old[name].state is ReplicaState.READY
        if status.state is ReplicaState.READY and not was_ready:
            render.say(f"{time.strftime('%H:%M:%S')} replica {name} is ready")
