"""The gateway as a Serve deployment: Ray keeps it alive, a child process does the work.

The child imports neither Ray nor Serve: it is small, has the interpreter lock for itself, and can be run and tested
without a cluster. It reads its options and every routing table as lines of JSON on standard input.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from hetero_llm.cluster.applications import start_serve
from hetero_llm.cluster.child import ChildProcess
from hetero_llm.cluster.controller import find_scheduler
from hetero_llm.cluster.names import GATEWAY_APP, ON_HEAD
from hetero_llm.cluster.ray_private import bind_serve_rpc
from hetero_llm.cluster.resident import release_startup_pages
from hetero_llm.cluster.session import Session
from hetero_llm.cluster.state import state_dir
from hetero_llm.errors import ClusterStartFailed, ErrorReport, HeteroError, from_report
from hetero_llm.gateway.listen import bind
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import to_data

START_DEADLINE_S = 30.0
"""The child listens within a second or two; a machine under load may need longer."""

POLL_S = 10.0
"""How long one question for a newer table waits at the scheduler."""

RETRY_S = 0.2
"""Pause between questions while the scheduler is away."""


class GatewayReplica:
    """Runs one gateway child and hands it each new routing table."""

    async def __init__(self, options: Mapping[str, Any]):  # type: ignore[misc]  # Serve awaits it
        """Start the child and wait until it listens.

        Raises:
            HeteroError: what the child said, for example that the port is in use.
        """
        self._options = msgspec.convert(options, GatewayOptions)
        bind_serve_rpc(ray.util.get_node_ip_address())
        self._listening: str | None = None
        self._feed: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._error: HeteroError | None = None
        self._started = threading.Event()
        self._lines: deque[str] = deque(maxlen=100)
        log_path = state_dir() / "logs" / f"gateway-{os.getpid()}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = log_path.open("w", buffering=1)
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        argv = (sys.executable, "-m", "hetero_llm.gateway")
        self._child = ChildProcess(argv, env=env, on_line=self._on_line, stdin=True)
        self._send(msgspec.json.encode(self._options))
        await asyncio.to_thread(self._started.wait, START_DEADLINE_S)
        if self._listening is None:
            await asyncio.to_thread(self._child.stop, 1.0)
            raise self._error or ClusterStartFailed(
                "the gateway did not start", cause=next(reversed(self._lines), None), log=str(log_path)
            )
        release_startup_pages()
        self._feed = asyncio.create_task(self._feed_tables())
        self._watch = asyncio.create_task(self._watch_child())

    async def address(self) -> str:
        """Return ``host:port`` the gateway listens on."""
        assert self._listening is not None
        return self._listening

    async def check_health(self) -> None:
        """Serve's health check; a dead child has ended this actor already."""

    async def __del__(self) -> None:
        """Serve's graceful stop: the child drains and ends."""
        for task in (self._feed, self._watch):
            if task is not None:
                task.cancel()
        await asyncio.to_thread(self._child.stop, self._options.drain_s + 1.0)
        self._log.close()

    async def _feed_tables(self) -> None:
        scheduler, version = find_scheduler(), -1
        while True:
            try:
                table = await scheduler.table.remote(version, POLL_S)
            except ray.exceptions.RayActorError:
                # The scheduler restarts by itself; until then the child goes on with the table it has.
                await asyncio.sleep(RETRY_S)
                continue
            if table is not None:
                version = msgspec.json.decode(table)["version"]
                await asyncio.to_thread(self._send, table)

    async def _watch_child(self) -> None:
        await asyncio.to_thread(self._child.wait)
        # Serve replaces a dead actor at once, an unhealthy one only after three failed checks.
        os._exit(1)

    def _send(self, line: bytes) -> None:
        with suppress(BrokenPipeError):  # the child died; _watch_child or the start deadline says so
            self._child.stdin.write(line + b"\n")
            self._child.stdin.flush()

    def _on_line(self, line: str) -> None:
        if not self._started.is_set() and line.startswith("{"):
            self._on_first_word(msgspec.json.decode(line))
            return
        self._lines.append(line)
        if not self._log.closed:
            self._log.write(line + "\n")

    def _on_first_word(self, word: Mapping[str, Any]) -> None:
        if "error" in word:
            self._error = from_report(msgspec.convert(word["error"], ErrorReport))
        self._listening = word.get("listening")
        self._started.set()


def deploy_gateway(session: Session, options: GatewayOptions) -> str:
    """Start the cluster's gateway and return its base URL; one that runs already is kept.

    Raises:
        ClusterStartFailed: it does not listen; the port may have been taken since it was checked.
    """
    start_serve()
    running = serve.status().applications.get(GATEWAY_APP)
    if running is None or running.status is ApplicationStatus.DEPLOY_FAILED:
        options = _with_port(options)
        deployment = serve.deployment(
            GatewayReplica,
            name="GatewayReplica",
            num_replicas=1,
            ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
            max_constructor_retry_count=1,
            graceful_shutdown_timeout_s=options.drain_s + 10.0,
            graceful_shutdown_wait_loop_s=0.1,
            # Serve notices at its next check that the actor is dead, and nobody is served until then.
            health_check_period_s=1.0,
            health_check_timeout_s=60.0,
        )
        try:
            serve.run(deployment.bind(to_data(options)), name=GATEWAY_APP, route_prefix=None)
        except RuntimeError as error:
            cause = _last_words()
            serve.delete(GATEWAY_APP)  # left as it is, it would be taken for a running one
            raise ClusterStartFailed(
                f"the gateway does not listen on {options.host}:{options.port}",
                cause=cause,
                next=("choose another --port", "hetero-llm doctor"),
                log=str(state_dir() / "logs"),
            ) from error
    return gateway_url(session)


def _with_port(options: GatewayOptions) -> GatewayOptions:
    """Settle a port that the system chooses now: a gateway that is started again must be found at the same address."""
    if options.port:
        return options
    with bind(options.host, 0) as probe:
        return replace(options, port=probe.getsockname()[1])


def _last_words() -> str | None:
    """Return what the gateway's constructor raised: the last line of the traceback that Serve keeps."""
    app = serve.status().applications[GATEWAY_APP]
    lines = [line for part in app.deployments.values() for line in part.message.splitlines() if line.strip()]
    return re.sub(r"^[\w.]+: ", "", lines[-1].strip()) if lines else None


def gateway_url(session: Session) -> str:
    """Return the base URL of the cluster's gateway.

    Raises:
        ClusterStartFailed: it does not answer; Serve may be trying to bring it back.
    """
    try:
        address: str = serve.get_app_handle(GATEWAY_APP).address.remote().result(timeout_s=START_DEADLINE_S)
    except TimeoutError as error:
        raise ClusterStartFailed(
            f"the gateway did not say within {START_DEADLINE_S:.0f} s where it listens", log=str(state_dir() / "logs")
        ) from error
    return f"http://{address}"


def delete_gateway(session: Session) -> None:
    """Stop the gateway: it finishes what it answers, for a few seconds, and ends."""
    serve.delete(GATEWAY_APP)
