"""A real local Ray cluster with stub devices, in a place of its own, and the check that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import stub_backend
from sandbox import Sandbox

with warnings.catch_warnings():
    # Ray's own code; once imported it is silent.
    warnings.simplefilter("ignore")
    import ray
    import ray.serve

from hetero_llm.cluster.deploy import deploy_model, snapshot
from hetero_llm.cluster.pools import ModelDeployment
from hetero_llm.cluster.session import Session, start_local
from hetero_llm.model import NodeInventory, ReplicaStatus, RoutingTable

PATIENCE_S = 40.0


@contextlib.contextmanager
def local_place() -> Iterator[Sandbox]:
    """Make this process, and what it starts, work in a sandbox where plugin `stub` is installed."""
    box = Sandbox(Path("unused"), engines=False)
    stub_backend.install(box.root / "plugin")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("RAY_ADDRESS", "RAY_AUTH_TOKEN", "HETERO_LLM_"))]:
            patch.delenv(name)
        for name, value in box.env.items():
            patch.setenv(name, value)
        patch.setenv("RAY_AUTH_TOKEN_PATH", "set by the session")
        patch.setenv("STUB_PREFLIGHT", str(box.root / "preflight"))
        patch.setenv("PYTHONPATH", os.pathsep.join((str(box.root / "plugin"), str(stub_backend.SUPPORT))))
        patch.setattr(tempfile, "tempdir", str(box.tmp))
        patch.syspath_prepend(str(box.root / "plugin"))
        try:
            yield box
        finally:
            box.close()


@contextlib.contextmanager
def local_cluster(devices: int = 4, *others: NodeInventory) -> Iterator[Cluster]:
    """Start a cluster in this process, of a node "here" and `others`; at the end it must have left nothing behind."""
    nodes = [stub_backend.node(devices), *others]
    with local_place() as box:
        with contextlib.closing(start_local(nodes, {stub_backend.KIND: None})) as session:
            yield Cluster(session, box.root, box)
        # Shared memory of engines that others run on this machine looks the same; tests look for their own engines'.
        left = [thing for thing in box.leftovers() if not thing.startswith("shared memory")]
        assert not left, left


class Cluster:
    def __init__(self, session: Session, model_path: Path, box: Sandbox | None = None) -> None:
        self.session = session
        self.model_path = model_path
        self.box = box

    def table(self) -> RoutingTable:
        return snapshot(self.session)

    def renew(self, status: ReplicaStatus, actor_id: str = "") -> None:
        ray.get(self.session.scheduler.renew.remote(msgspec.to_builtins(status), actor_id))

    def deploy(self, model: str, *groups: tuple[str, ...], flags: tuple[object, ...] = (), nodes: int = 1) -> None:
        deploy_model(
            self.session,
            ModelDeployment(
                name=model,
                source=model,
                path=str(self.model_path),
                plan=stub_backend.plan(model, groups, nodes),
                engine_args=tuple(map(str, flags)),
            ),
        )

    def replicas(self, model: str) -> list[ReplicaStatus]:
        return [status for status in self.table().replicas if status.model == model]

    def wait_replicas(
        self, model: str, condition: Callable[[list[ReplicaStatus]], bool], deadline_s: float = PATIENCE_S
    ) -> list[ReplicaStatus]:
        """Return the replicas of `model` once `condition` holds of them."""
        end = time.monotonic() + deadline_s
        while not condition(seen := self.replicas(model)):
            assert time.monotonic() < end, f"condition not met in {deadline_s} s: {seen}"
            time.sleep(0.1)
        return seen


def wait_for(condition: Callable[[], object], deadline_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"condition not met in {deadline_s} s"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def kill_scheduler(session: Session) -> int:
    """Kill the scheduler actor's process the hard way; return its process id."""
    (pid,) = [p.pid for p in psutil.process_iter(["cmdline"]) if _is_scheduler(p, session)]
    psutil.Process(pid).kill()
    return pid


def scheduler_pids(session: Session) -> list[int]:
    return [p.pid for p in psutil.process_iter() if _is_scheduler(p, session)]


def _is_scheduler(process: psutil.Process, session: Session) -> bool:
    try:
        title = " ".join(process.cmdline())
        return title.startswith("ray::Scheduler") and process.ppid() in _raylets(session)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _raylets(session: Session) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words and words[0].endswith("/raylet") and str(session.temp_dir) in " ".join(words):
            found.append(process.pid)
    return found


def main() -> None:
    """A cluster of its own in a process of its own, with an engine that never gets to its first token.

    Prints its address and folder once the engine hangs there, and ends with its input.
    """
    warnings.simplefilter("ignore")
    with contextlib.closing(start_local([stub_backend.node(1)], {stub_backend.KIND: None})) as session:
        cluster = Cluster(session, Path.cwd())
        cluster.deploy("m", ("stub-0",), flags=("--hang", "token"))
        cluster.wait_replicas("m", lambda seen: bool(seen) and seen[0].phase == "generating the first token")
        print(session.address, session.temp_dir, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
