"""Process groups on Ascend: HCCL, with interface, address and ports stated instead of guessed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from hetero_llm.plugin import Device, GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.interfaces import interface_of
from hetero_llm_ascend import ports, visible

BACKEND = "hccl"
STALE = (
    "RANK_TABLE_FILE",
    "RANK_ID",
    "RANK_SIZE",
    "HCCL_HOST_SOCKET_PORT_RANGE",
    "HCCL_NPU_SOCKET_PORT_RANGE",
    "HCCL_SOCKET_FAMILY",
    "HCCL_WHITELIST_FILE",
    "TORCHELASTIC_RUN_ID",
    "GROUP_RANK",
    "LOCAL_WORLD_SIZE",
)
"""Left over from another launcher. A rank table silently replaces the whole set-up, a port range the base port."""

CONNECT_TIMEOUT_S = 120
"""Seconds HCCL waits for the other ranks to appear; 120 is the least it accepts, and its default."""

EXEC_TIMEOUT_S = 612
"""Seconds a collective may wait; the default of half an hour is what users of a dead rank wait. A multiple of 68, as
older parts demand."""


def group(spec: GroupSpec) -> GroupSetup:
    """Return the HCCL set-up of `spec`; more than one rank gets a pre-flight that really all-reduces.

    ``LOCAL_RANK`` is the place of the rank's device among the visible ones, which are ascending.
    """
    deadline = f"{spec.deadline_s:g}"
    program = (sys.executable, "-m", "hetero_llm.plugin.preflight", "--backend", BACKEND, "--device", "npu")
    return GroupSetup(
        torch_backend=BACKEND,
        rank_env=tuple(_rank_env(spec, rank) for rank in spec.ranks),
        preflight_argv=(*program, "--import", "torch_npu", "--deadline-s", deadline) if len(spec.ranks) > 1 else None,
        env_remove=STALE,
    )


def hccl_env(address: str, devices: Sequence[Device]) -> Mapping[str, str]:
    """Return the HCCL and Gloo variables of a node's ranks on `devices`, which the others reach at `address`.

    The same for all ranks of a replica on a node. Sizes are in seconds, which is HCCL's unit.
    """
    interface = interface_of(address)
    is_free = ports.port_is_free(address) if interface else ports.any_port
    lowest = min((device.index for device in devices), default=0)
    env = {
        "HCCL_IF_IP": address,
        "HCCL_IF_BASE_PORT": str(ports.base_port(lowest, is_free)),
        "HCCL_CONNECT_TIMEOUT": str(CONNECT_TIMEOUT_S),
        "HCCL_EXEC_TIMEOUT": str(EXEC_TIMEOUT_S),
    }
    if interface:
        env |= {"HCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    return env


def _rank_env(spec: GroupSpec, rank: RankSpec) -> Mapping[str, str]:
    here = sorted((other.device for other in spec.ranks if other.node == rank.node), key=lambda device: device.index)
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(here.index(rank.device)),
        "WORLD_SIZE": str(len(spec.ranks)),
        "MASTER_ADDR": spec.master_address,
        "MASTER_PORT": str(spec.master_port),
        visible.VARIABLE: visible.value(here),
        **hccl_env(rank.address, here),
        # An error of HCCL is raised where it is waited for, not by a thread that ends the process without a word.
        "HCCL_BLOCKING_WAIT": "1",
        "TORCH_HCCL_BLOCKING_WAIT": "1",
    }
