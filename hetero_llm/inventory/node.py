"""The devices of this machine as nodes, and inventories read from a file."""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from hetero_llm.errors import InventoryInvalid
from hetero_llm.inventory.override import node_name, overridden_kinds, override
from hetero_llm.inventory.probe import DEADLINE_S, Probe, probe_kinds
from hetero_llm.model import SCHEMA_VERSION, Inventory, NodeInventory, from_data
from hetero_llm.plugin.manager import PluginManager


def local_inventories(
    manager: PluginManager, deadline_s: float = DEADLINE_S, kinds: Collection[str] = ()
) -> tuple[NodeInventory, ...]:
    """Return this machine as one node per kind that has devices or problems, ascending by kind.

    An override replaces the discovery of its kind. The node is named by ``HETERO_LLM_NODE_NAME``, else after the host,
    with the kind appended when there are several.

    Args:
        kinds: only these; empty for all.

    Raises:
        OverrideInvalid: an override variable cannot be read.
    """
    wanted = [kind for kind in {*manager.kinds(), *overridden_kinds()} if not kinds or kind in kinds]
    found = discover_kinds(wanted, deadline_s=deadline_s)
    present = {kind: probe for kind, probe in sorted(found.items()) if _is_present(probe)}
    name, host, address = node_name(), socket.gethostname(), local_address()
    return tuple(
        NodeInventory(
            node=name if len(present) == 1 else f"{name}-{kind}",
            host=host,
            address=address,
            kind=kind,
            versions=probe.versions,
            devices=probe.discovery.devices,
            problems=probe.discovery.problems,
        )
        for kind, probe in present.items()
    )


def discover_kinds(
    kinds: Collection[str],
    environ: Mapping[str, str] = os.environ,
    deadline_s: float = DEADLINE_S,
    stopped: threading.Event | None = None,
) -> dict[str, Probe]:
    """Return what a machine with `environ` has of each kind: what its override says, else what its backend finds.

    Once `stopped` is set what is not known yet is a problem.

    Raises:
        OverrideInvalid: an override variable cannot be read.
    """
    overrides = ((kind, override(kind, environ)) for kind in kinds)
    faked = {kind: Probe(discovery=found) for kind, found in overrides if found is not None}
    return probe_kinds([kind for kind in kinds if kind not in faked], deadline_s, environ, stopped) | faked


def _is_present(probe: Probe) -> bool:
    return bool(probe.discovery.devices or probe.discovery.problems)


def local_address(towards: str = "192.0.2.1") -> str:
    """Return the IPv4 address this machine uses towards others; loopback when it has no route.

    Args:
        towards: host that is to reach it; the default is a documentation address (RFC 5737) that nobody has.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only makes the kernel choose the source address.
            probe.connect((towards, 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def load_inventory(path: Path) -> Inventory:
    """Read what ``hetero-llm devices -o json`` printed, on this or another machine.

    Raises:
        InventoryInvalid: the file cannot be read, is not such output, or names a node or a device twice.
    """
    try:
        document = msgspec.json.decode(path.read_bytes())
        inventory = from_data(_data(path, document), Inventory)
    except OSError as error:
        raise _invalid(path, error.strerror or str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid(path, str(error)) from error
    _check_unique(path, "node", [node.node for node in inventory.nodes])
    _check_unique(path, "device uid", [device.uid for node in inventory.nodes for device in node.devices])
    return inventory


def _data(path: Path, document: object) -> object:
    if not isinstance(document, dict) or "data" not in document:
        raise _invalid(path, 'it has no "data" at its top')
    if document.get("schema") != SCHEMA_VERSION:
        raise _invalid(path, f"its schema is {document.get('schema')!r}, this hetero-llm reads {SCHEMA_VERSION}")
    return document["data"]


def _check_unique(path: Path, what: str, names: list[str]) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise _invalid(path, f"{what} {twice[0]!r} appears twice")


def _invalid(path: Path, cause: str) -> InventoryInvalid:
    advice = ("hetero-llm devices -o json > inventory.json   (on the machine with the devices)",)
    return InventoryInvalid(f"cannot use {path} as an inventory", cause=cause, next=advice)
