"""The doctor's checks of addresses, interfaces and ports, where groups of ranks and clusters fail to meet."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_llm.errors import FolderUnusable
from hetero_llm.plugin import Check

GATEWAY_PORT = 8000
"""Where `serve` listens unless told otherwise."""

MIN_EPHEMERAL_PORTS = 2000
"""Ray's workers, engines and groups of ranks take theirs from this range, dozens per replica."""

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")

INTERFACE_VARIABLES = {"NCCL_SOCKET_IFNAME": "prefix", "HCCL_SOCKET_IFNAME": "prefix", "GLOO_SOCKET_IFNAME": "exact"}
"""Variables that name network interfaces, and how: Gloo takes whole names, NCCL and HCCL prefixes, ``=name`` and
``^name`` (NCCL user guide; CANN environment variables)."""

ADDRESS_VARIABLES = ("HCCL_IF_IP",)

Interfaces = Mapping[str, Sequence[str]]
"""Addresses by name of a local interface that is up."""


def network_checks() -> tuple[Check, ...]:
    """Run all of them on this machine."""
    from hetero_llm.inventory.node import local_address

    interfaces = local_interfaces()
    return (
        check_address(local_address(), interfaces),
        check_interface_variables(os.environ, interfaces),
        check_gateway_port(GATEWAY_PORT, ours=_served_here()),
        check_port_range(EPHEMERAL_RANGE),
    )


def local_interfaces() -> dict[str, tuple[str, ...]]:
    """Return the IP addresses of each local interface that is up."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: tuple(item.address.partition("%")[0] for item in addresses if item.family in families)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
    }


def check_address(address: str, interfaces: Interfaces) -> Check:
    """Return whether the address this machine would join a cluster with is its own."""
    owner = next((name for name, addresses in interfaces.items() if address in addresses), None)
    if owner is None:
        have = ", ".join(f"{name} {' '.join(addresses)}" for name, addresses in interfaces.items() if addresses)
        text = f"{address} is on no local interface that is up; there are {have or 'none'}"
        return Check(name="address", ok=False, text=text, next=("bring the interface up", "ip address"))
    if ipaddress.ip_address(address).is_loopback:
        text = f"only {address}: this machine can serve for itself, not join others"
        return Check(name="address", ok=None, text=text, next=("ip route",))
    return Check(name="address", ok=True, text=f"{address} on {owner}")


def check_interface_variables(environ: Mapping[str, str], interfaces: Interfaces) -> Check:
    """Return whether variables that tell collective libraries where to meet name something of this machine."""
    there = [f"{name}={environ[name]}" for name in (*INTERFACE_VARIABLES, *ADDRESS_VARIABLES) if environ.get(name)]
    wrong = [f"{name}={environ[name]}" for name in INTERFACE_VARIABLES if _names_nothing(name, environ, interfaces)]
    own = {address for addresses in interfaces.values() for address in addresses}
    wrong += [f"{name}={environ[name]}" for name in ADDRESS_VARIABLES if environ.get(name) and environ[name] not in own]
    if wrong:
        text = f"{', '.join(wrong)} is none of this machine's interfaces ({', '.join(interfaces) or 'none'})"
        advice = f"unset {' '.join(item.partition('=')[0] for item in wrong)}: the right one is found by itself"
        return Check(name="interfaces", ok=False, text=text, next=(advice,))
    return Check(name="interfaces", ok=True, text=", ".join(there) or "none prescribed; groups find their own")


def _names_nothing(variable: str, environ: Mapping[str, str], interfaces: Interfaces) -> bool:
    value = environ.get(variable, "")
    if not value:
        return False
    if INTERFACE_VARIABLES[variable] == "exact":
        return not all(name in interfaces for name in value.split(","))
    if value.startswith("^"):
        excluded = tuple(value[1:].split(","))
        return all(name.startswith(excluded) for name in interfaces)
    if value.startswith("="):
        return not any(name in interfaces for name in value[1:].split(","))
    return not any(name.startswith(tuple(value.split(","))) for name in interfaces)


def check_gateway_port(port: int, *, ours: bool = False) -> Check:
    """Return whether `serve` could listen on its usual port; one that is taken is no failure, another can be chosen.

    Args:
        ours: a `serve` of this user runs here, so the port is probably its.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if ours:
                return Check(name="gateway-port", ok=True, text=f"port {port} is taken; a model is being served here")
            why = "is taken by another program" if error.errno == errno.EADDRINUSE else str(error.strerror)
            advice = ("hetero-llm serve --port PORT", f"ss -ltnp 'sport = :{port}'")
            return Check(name="gateway-port", ok=None, text=f"port {port} {why}", next=advice)
    return Check(name="gateway-port", ok=True, text=f"port {port} is free")


def check_port_range(path: Path) -> Check:
    """Return whether the kernel has enough ports to give out.

    Args:
        path: file with the first and the last port, ``32768 60999``.
    """
    try:
        first, last = (int(part) for part in path.read_text().split())
    except (OSError, ValueError) as error:
        return Check(name="port-range", ok=None, text=f"{path} cannot be read: {error}")
    count = max(0, last - first + 1)
    text = f"ports {first} to {last} are given out, {count} of them; {MIN_EPHEMERAL_PORTS} wanted"
    ok = count >= MIN_EPHEMERAL_PORTS
    advice = ('sysctl -w net.ipv4.ip_local_port_range="32768 60999"',)
    return Check(name="port-range", ok=ok, text=text, next=() if ok else advice)


def _served_here() -> bool:
    from hetero_llm.cluster.state import live_records

    try:
        return bool(live_records())
    except (FolderUnusable, OSError):  # a folder for records that cannot be used is a finding of its own
        return False
