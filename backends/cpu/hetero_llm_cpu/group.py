"""Process groups on CPU: Gloo over TCP, with the network interface stated instead of guessed."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hetero_llm.plugin import GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.interfaces import interface_of

BACKEND = "gloo"
_STALE = ("RANK_TABLE_FILE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def group(spec: GroupSpec) -> GroupSetup:
    """Return the Gloo set-up of `spec`; more than one rank gets a pre-flight that really all-reduces."""
    program = (sys.executable, "-m", "hetero_llm.plugin.preflight", "--backend", BACKEND, "--device", "cpu")
    preflight = (*program, "--deadline-s", f"{spec.deadline_s:g}")
    return GroupSetup(
        torch_backend=BACKEND,
        rank_env=tuple(_rank_env(spec, rank) for rank in spec.ranks),
        preflight_argv=preflight if len(spec.ranks) > 1 else None,
        env_remove=_STALE,
    )


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
