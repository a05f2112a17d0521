"""Runs a group's pre-flight: one short program per rank, all at once, before the engine takes minutes to load."""

from __future__ import annotations

import os
import time
from collections import deque

from hetero_llm.cluster.child import ChildProcess
from hetero_llm.errors import GroupPreflightFailed
from hetero_llm.plugin import GroupSetup, GroupSpec


def run_preflight(setup: GroupSetup, spec: GroupSpec) -> None:
    """Run the pre-flight of a group whose ranks are all on this node.

    Raises:
        GroupPreflightFailed: a rank failed or did not answer in time. The first rank to fail is named: the others
            only fail because they wait for it.
    """
    if setup.preflight_argv is None:
        return
    outputs: list[deque[str]] = [deque(maxlen=200) for _ in spec.ranks]
    base = {name: value for name, value in os.environ.items() if name not in setup.env_remove}
    children: list[ChildProcess] = []
    try:
        for rank, output in zip(setup.rank_env, outputs, strict=True):
            children.append(
                ChildProcess(setup.preflight_argv, env={**base, **rank}, on_line=output.append)  # one per rank
            )
        _wait(children, outputs, setup, spec)
    finally:
        for child in children:
            child.stop(grace_s=0.5)


def _wait(children: list[ChildProcess], outputs: list[deque[str]], setup: GroupSetup, spec: GroupSpec) -> None:
    deadline = time.monotonic() + spec.deadline_s
    waiting = dict(enumerate(children))
    while waiting:
        for position, child in tuple(waiting.items()):
            code = child.exit_code()
            if code is None:
                continue
            child.wait(1.0)
            if code != 0:
                raise _failed(position, f"exited with code {code}", outputs, setup, spec)
            del waiting[position]
        if waiting and time.monotonic() > deadline:
            raise _failed(min(waiting), f"did not finish within {spec.deadline_s:.0f} s", outputs, setup, spec)
        time.sleep(0.05)


def _failed(
    position: int, what: str, outputs: list[deque[str]], setup: GroupSetup, spec: GroupSpec
) -> GroupPreflightFailed:
    rank = spec.ranks[position]
    said = next((line for line in reversed(outputs[position]) if line.strip()), None)
    return GroupPreflightFailed(
        f"rank {rank.rank} on {rank.node} (device {rank.device.uid}) {what} in the {setup.torch_backend} pre-flight",
        cause=said,
        next=(
            f"check that {rank.address} reaches {spec.master_address}:{spec.master_port}",
            "hetero-llm doctor",
        ),
    )
