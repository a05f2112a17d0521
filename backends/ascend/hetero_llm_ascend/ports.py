"""The window of host ports HCCL takes: one per replica, so that two replicas of a host never meet in one.

HCCL binds up to 32 ports from HCCL_IF_BASE_PORT on (CANN 8.5, *HCCL_IF_BASE_PORT*; older ones 16), 60000 by default.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

FIRST_PORT = 60000
WINDOW_PORTS = 32
_SLOTS = 32
_ROUNDS = 5
LAST_BASE = FIRST_PORT + _SLOTS * _ROUNDS * WINDOW_PORTS - WINDOW_PORTS


def base_port(lowest_index: int, is_free: Callable[[int], bool]) -> int:
    """Return the first port of a free window for the replica whose lowest logical device number is `lowest_index`.

    A device belongs to one replica at a time, so replicas that choose at the same moment cannot choose the same: each
    device has its own slot, and only windows of that slot are tried. When all are taken the first is returned: HCCL
    then fails with a message of its own.
    """
    slot = lowest_index % _SLOTS
    bases = [FIRST_PORT + (turn * _SLOTS + slot) * WINDOW_PORTS for turn in range(_ROUNDS)]
    return next((base for base in bases if all(is_free(base + port) for port in range(WINDOW_PORTS))), bases[0])


def port_is_free(address: str) -> Callable[[int], bool]:
    """Return a test whether a TCP port can be bound on a local address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET

    def is_free(port: int) -> bool:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                return False
        return True

    return is_free


def any_port(_port: int) -> bool:
    """Call every port free: those of another machine cannot be tried from here."""
    return True
