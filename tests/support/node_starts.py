"""Nodes to start in tests, with stub devices; run as a program, a cluster of two that lives as long as its input."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path

import stub_backend

from hetero_llm.cluster.address import make_token, use_token
from hetero_llm.cluster.node_agent import NodeAgent, NodeStart

LOOPBACK = "127.0.0.1"


def start(name: str, kind: str | None, devices: int, host: str = "box", **labels: str) -> NodeStart:
    """Return a node to be with that many devices; without a kind it has none."""
    inventory, native = None, {"cuda": "GPU", "ascend": "NPU"}.get(kind)
    if kind is not None:
        base = stub_backend.node(devices)
        own = (replace(device, kind=kind, uid=f"{name}-{device.index}") for device in base.devices)
        inventory = replace(base, kind=kind, devices=tuple(own), labels=labels)
    return NodeStart(
        name=name, host=host, ip=LOOPBACK, inventory=inventory, native_resource=native, environ=dict(os.environ)
    )


def head() -> NodeAgent:
    """Start a cluster whose head has no devices, with a token of its own. The caller ends it."""
    agent = NodeAgent()
    with contextlib.ExitStack() as undo:
        undo.callback(agent.leave)
        token = Path(agent.root) / "token"
        make_token(token)
        use_token(token)
        agent.start_head(start("head", None, 0), 0)
        undo.pop_all()
    return agent


def main() -> None:
    """Print the folder of a running cluster's files, and end with the input."""
    with contextlib.ExitStack() as undo:
        agent = head()
        undo.callback(agent.leave)
        agent.join(agent.address, [start("one", "cuda", 1)])
        agent.register()
        print(agent.root, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
