"""Reads the health of one machine's devices again and again, and publishes the nodes anew when something changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetero_llm.errors import HeteroError
from hetero_llm.inventory.quarantine import Quarantine
from hetero_llm.model import Device, Health, NodeInventory
from hetero_llm.plugin import Discovery

PERIOD_S = 30.0
"""Pause between two readings. A reading starts a process per kind and may take its whole deadline."""


_GONE = Health.FAILED


class HealthWatch:
    """Watches some nodes until `stop`.

    Args:
        nodes: as they were published.
        read: kinds → what their discovery says now.
        publish: makes one node known anew; may raise HeteroError, which is told to `tell` and tried again.
        tell: takes a line for people.
    """

    def __init__(
        self,
        nodes: Sequence[NodeInventory],
        read: Callable[[Sequence[str]], Mapping[str, Discovery]],
        publish: Callable[[NodeInventory], None],
        tell: Callable[[str], None],
        period_s: float = PERIOD_S,
    ) -> None:
        self._nodes = {node.node: node for node in nodes}
        self._quarantine = Quarantine()
        self._read = read
        self._publish = publish
        self._tell = tell
        self._period_s = period_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device-health", daemon=True)

    def start(self) -> None:
        """Begin; the first reading comes after one period."""
        self._thread.start()

    def stop(self) -> None:
        """End; a reading under way is not waited for."""
        self._stopped.set()

    def look(self) -> None:
        """Take one reading, and publish each node of which something changed."""
        found = self._read(sorted({node.kind for node in self._nodes.values()}))
        for name, node in tuple(self._nodes.items()):
            now = self._reading(node, found[node.kind])
            if now != node:
                for line in _changes(node, now):
                    self._tell(f"node {name}: {line}")
                self._publish(now)
                self._nodes[name] = now

    def _reading(self, node: NodeInventory, found: Discovery) -> NodeInventory:
        """Return `node` with the health of this reading. Other facts are those its Ray resources were made from."""
        if found.problems and not found.devices:
            # A tool that hung or crashed says nothing about the devices; a busy machine must not lose them all at once.
            return replace(node, problems=found.problems)
        seen = {device.uid: device for device in found.devices}
        # A device that is not listed any more has fallen off the bus; its Ray resource is still there.
        health = {device.uid: seen[device.uid].health if device.uid in seen else _GONE for device in node.devices}
        read = self._quarantine.read([replace(device, health=health[device.uid]) for device in node.devices])
        return replace(node, devices=read, problems=found.problems)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.look()
            except HeteroError as error:
                self._tell(f"device health was not published: {error}")


def _changes(before: NodeInventory, now: NodeInventory) -> list[str]:
    def name(device: Device) -> str:
        return f"{device.kind} {device.accelerator} {device.index} ({device.uid})"

    pairs = zip(before.devices, now.devices, strict=True)
    lines = [f"{name(old)} was {old.health}, is {new.health}" for old, new in pairs if old.health != new.health]
    told = [problem.text for problem in now.problems if problem not in before.problems]
    return lines + told
