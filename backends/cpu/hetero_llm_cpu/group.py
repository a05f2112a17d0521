"""Process groups on CPU: Gloo over TCP, with the network interface stated instead of guessed."""

from __future__ import annotations

import ipaddress
import socket
import sys
from collections.abc import Mapping

import psutil

from hetero_llm.plugin import GroupSetup, GroupSpec, RankSpec

BACKEND = "gloo"
_STALE = ("RANK_TABLE_FILE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def group(spec: GroupSpec) -> GroupSetup:
    """Return the Gloo set-up of `spec`; more than one rank gets a pre-flight that really all-reduces."""
    preflight = (sys.executable, "-m", "hetero_llm_cpu.preflight", f"{spec.deadline_s:g}")
    return GroupSetup(
        torch_backend=BACKEND,
        rank_env=tuple(_rank_env(spec, rank) for rank in spec.ranks),
        preflight_argv=preflight if len(spec.ranks) > 1 else None,
        env_remove=_STALE,
    )


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


def _rank_env(spec: GroupSpec, rank: RankSpec) -> Mapping[str, str]:
    on_node = [other.rank for other in spec.ranks if other.node == rank.node]
    env = {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(on_node.index(rank.rank)),
        "WORLD_SIZE": str(len(spec.ranks)),
        "MASTER_ADDR": spec.master_address,
        "MASTER_PORT": str(spec.master_port),
        "OMP_NUM_THREADS": str(max(1, len(rank.device.cores))),
    }
    return env | _interface_env(spec, rank)


def _interface_env(spec: GroupSpec, rank: RankSpec) -> dict[str, str]:
    """Gloo must listen where the others reach this rank. One node needs no network; else the rank's own address."""
    one_node = len({other.node for other in spec.ranks}) == 1
    name = interface_of(spec.master_address if one_node else rank.address)
    return {"GLOO_SOCKET_IFNAME": name} if name else {}


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
