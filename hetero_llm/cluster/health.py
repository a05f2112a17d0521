"""Reads health and free memory of one machine's devices again and again, and publishes the nodes when they changed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hetero_llm.cluster.lease import holders
from hetero_llm.errors import HeteroError
from hetero_llm.inventory.node import discover_kinds
from hetero_llm.inventory.quarantine import Quarantine
from hetero_llm.model import Device, Health, NodeInventory
from hetero_llm.plugin import Discovery

PERIOD_S = 30.0
"""Pause between two readings. A reading starts a process per kind and may take its whole deadline."""

STOP_DEADLINE_S = 6.0
"""A program that is killed inside a sick driver is waited for 5 s."""

MOVED_SHARE = 0.05
MOVED_BYTES = 256 << 20
"""Free memory alone is news when it is further than both from what was published: it is never quite still."""

_GONE = Health.FAILED


class HealthWatch:
    """Watches some nodes until `stop`.

    Args:
        nodes: as they were published.
        read: kinds → what their discovery says now; it comes back soon once the event is set.
        publish: makes one node known anew; what it raises is told to `tell`, and it is tried again.
        tell: takes a line for people.
        held: uids → those of them that replicas on this machine hold now.
    """

    def __init__(
        self,
        nodes: Sequence[NodeInventory],
        read: Callable[[Sequence[str], threading.Event], Mapping[str, Discovery]],
        publish: Callable[[NodeInventory], None],
        tell: Callable[[str], None],
        period_s: float = PERIOD_S,
        held: Callable[[Iterable[str]], Collection[str]] = holders,
    ) -> None:
        self._nodes = {node.node: node for node in nodes}
        self._quarantine = Quarantine()
        self._read = read
        self._publish = publish
        self._tell = tell
        self._period_s = period_s
        self._held = held
        self._stopped = threading.Event()
        self._publishing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="device-health", daemon=True)

    def start(self) -> None:
        """Begin; the first reading comes after one period."""
        self._thread.start()

    def stop(self) -> None:
        """End: nothing is published after this, and nothing of a reading under way is left."""
        self._stopped.set()
        with self._publishing:
            pass
        if self._thread.is_alive():
            self._thread.join(STOP_DEADLINE_S)

    def look(self) -> None:
        """Take one reading, and publish each node of which something changed."""
        # A replica that comes or goes while the devices are read has its memory in the reading or not, nobody knows.
        before = self._held_now()
        found = self._read(sorted({node.kind for node in self._nodes.values()}), self._stopped)
        held = before | self._held_now()
        for name, node in tuple(self._nodes.items()):
            now = self._reading(node, found[node.kind], held)
            if _is_news(node, now) and self._published(now):
                self._nodes[name] = now
                for line in _changes(node, now):
                    self._tell(f"node {name}: {line}")

    def _held_now(self) -> frozenset[str]:
        return frozenset(self._held(device.uid for node in self._nodes.values() for device in node.devices))

    def _published(self, node: NodeInventory) -> bool:
        """Publish, unless it is over: a node that was withdrawn would come back."""
        with self._publishing:
            if self._stopped.is_set():
                return False
            self._publish(node)
            return True

    def _reading(self, node: NodeInventory, found: Discovery, held: Collection[str]) -> NodeInventory:
        """Return `node` with health and memory of this reading. The rest is what its Ray resources were made from."""
        if found.problems and not found.devices:
            # A tool that hung or crashed says nothing about the devices; a busy machine must not lose them all at once.
            return replace(node, problems=found.problems)
        seen = {device.uid: device for device in found.devices}
        ours = _with_replicas(node.devices, held)
        read = self._quarantine.read([_read_again(device, seen.get(device.uid), ours) for device in node.devices])
        return replace(node, devices=read, problems=found.problems)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                self.look()
            except HeteroError as error:
                self._tell(f"device health was not published: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it was, the node must go on telling of its devices
                self._tell(f"device health was not published: {type(error).__name__}: {error}")


def watch_nodes(nodes: Sequence[NodeInventory], address: str, tell: Callable[[str], None]) -> HealthWatch:
    """Watch this machine's `nodes`, published as they are, for the cluster at `address`; returns the running watch."""
    from hetero_llm.cluster.nodes import republish_node

    watch = HealthWatch(nodes, _read_now, lambda node: republish_node(address, node), tell)
    watch.start()
    return watch


def _read_now(kinds: Sequence[str], stopped: threading.Event) -> Mapping[str, Discovery]:
    return {kind: probe.discovery for kind, probe in discover_kinds(kinds, stopped=stopped).items()}


def _with_replicas(devices: Sequence[Device], held: Collection[str]) -> set[str]:
    """Return the uids of `devices` whose reading counts what a replica uses.

    Plans leave out a device that is held, and once the replica is gone its memory is free again; published, it would
    be missing until the next reading. Devices on the system's memory share it, so one replica is in all their readings.
    """
    ours = {device.uid for device in devices if device.uid in held}
    return ours | {device.uid for device in devices if device.unified_memory and ours}


def _read_again(device: Device, now: Device | None, ours: Collection[str]) -> Device:
    """Return `device` as this reading has it; None says that it was not listed."""
    if now is None:
        # It has fallen off the bus; its Ray resource is still there.
        return replace(device, health=_GONE)
    keeps = device.uid in ours or now.free_bytes is None
    return replace(device, health=now.health, free_bytes=device.free_bytes if keeps else now.free_bytes)


def _is_news(before: NodeInventory, now: NodeInventory) -> bool:
    devices = tuple(
        new if _has_moved(old, new) else replace(new, free_bytes=old.free_bytes)
        for old, new in zip(before.devices, now.devices, strict=True)
    )
    return replace(now, devices=devices) != before


def _has_moved(before: Device, now: Device) -> bool:
    if before.free_bytes is None or now.free_bytes is None:
        return before.free_bytes != now.free_bytes
    least_bytes = max(MOVED_BYTES, MOVED_SHARE * (now.memory_bytes or 0))
    return abs(now.free_bytes - before.free_bytes) > least_bytes


def _changes(before: NodeInventory, now: NodeInventory) -> list[str]:
    def name(device: Device) -> str:
        return f"{device.kind} {device.accelerator} {device.index} ({device.uid})"

    pairs = zip(before.devices, now.devices, strict=True)
    lines = [f"{name(old)} was {old.health}, is {new.health}" for old, new in pairs if old.health != new.health]
    told = [problem.text for problem in now.problems if problem not in before.problems]
    return lines + told
