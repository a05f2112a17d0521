"""Which network interface carries an address. Collective libraries must be told, their own guess is often wrong."""

from __future__ import annotations

import ipaddress
import socket

import psutil


def interface_of(address: str) -> str | None:
    """Return the local network interface that has `address`, None when no local one has it.

    A name is resolved first. Loopback is ``lo`` whatever address of 127.0.0.0/8 is meant.
    """
    try:
        wanted = ipaddress.ip_address(socket.gethostbyname(address) if not _is_ip(address) else address)
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        own = [ipaddress.ip_address(a.address.split("%")[0]) for a in addresses if _is_ip(a.address.split("%")[0])]
        if wanted in own or (wanted.is_loopback and any(ip.is_loopback for ip in own)):
            return name
    return None


def address_towards(peer: str) -> str | None:
    """Return this machine's own IPv4 address on the way to `peer`, None when there is no way or no such name.

    The kernel's routing table decides; nothing is sent. Towards one of the machine's own addresses it is that address.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
