"""A cluster of `node start` and `node join` processes on this machine, and a `serve` on it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

from sandbox import Sandbox, Serve
from steady_load import SteadyLoad

PATIENCE_S = 90.0
HERE = ("--address-of-this-node", "127.0.0.1")


class NodeCluster:
    """Starts with a head; `join` adds nodes, `deploy` a model, `end` takes all down and checks how they end."""

    def __init__(self, box: Sandbox, head: str, kind: str | None = None, **env: str) -> None:
        self.box = box
        self.nodes: dict[str, Any] = {}
        self.address = ""
        self.serve: Serve | None = None
        self._start(head, kind, ("start", "--head", "--port", "0"), env)
        self.address = self.wait(lambda: self._listed().get("address"))

    def join(self, name: str, kind: str, *flags: str, **env: str) -> None:
        self._start(name, kind, ("join", self.address, *flags), env)

    def _start(self, name: str, kind: str | None, verb: tuple[str, ...], env: dict[str, str]) -> None:
        own = {"HETERO_LLM_NODE_NAME": name, "HETERO_LLM_SIM_NODE": name, **env}
        kinds = ("--kind", kind) if kind else ()
        self.nodes[name] = self.box.start("node", *verb, *kinds, *HERE, **own)

    def deploy(self, *args: str) -> None:
        self.serve = self.box.serve(*args)
        self.serve.wait_ready()

    @property
    def model(self) -> str:
        assert self.serve is not None
        return str(self.serve.ready["models"][0])

    def _listed(self) -> dict[str, Any]:
        done = self.box.run("node", "list", "-o", "json")
        return self.box.json("node", "list") if done.returncode == 0 else {}

    def alive(self) -> set[str]:
        return {node["node"] for node in self._listed().get("nodes", ()) if node["alive"]}

    def ready(self) -> dict[str, str]:
        """Return replica → node of those that are ready."""
        assert self.serve is not None
        return {r["replica"]: r["node"] for r in self.serve.replicas() if r["state"] == "ready"}

    def wait_ready_on(self, *names: str) -> None:
        self.wait(lambda: sorted(self.ready().values()) == sorted(names))

    def wait(self, condition: Callable[[], Any], deadline_s: float = PATIENCE_S) -> Any:
        end = time.monotonic() + deadline_s
        while not (answer := condition()):
            known = self.serve.replicas() if self.serve is not None else None
            assert time.monotonic() < end, f"not in {deadline_s} s; replicas: {known}"
            time.sleep(0.3)
        return answer

    def load(self) -> SteadyLoad:
        assert self.serve is not None
        return SteadyLoad(self.serve.url, self.model)

    def end(self) -> None:
        if self.serve is not None:
            self.serve.interrupt()
            assert self.serve.wait() == 130, self.serve.log + self.serve.out.read_text()
        for name, node in reversed(list(self.nodes.items())):
            if node.poll() is None:
                node.send_signal(signal.SIGTERM)
                assert node.wait(90) == 130, f"node {name}"
        assert self.box.leftovers() == []
