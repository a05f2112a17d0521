"""Process groups of the simulation: none are formed, since one process stands for all ranks of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_llm.plugin import GroupSetup, GroupSpec, RankSpec
from hetero_llm_sim.engine import device_env

BACKEND = "sim"
"""Named so that nobody takes it for a real collective backend."""


def group(spec: GroupSpec) -> GroupSetup:
    """Return the variables real ranks would get, and no pre-flight: there are no ranks that could fail to meet."""
    return GroupSetup(
        torch_backend=BACKEND,
        rank_env=tuple(_rank_env(spec, rank) for rank in spec.ranks),
        preflight_argv=None,
        env_remove=("RANK_TABLE_FILE",),
    )


def _rank_env(spec: GroupSpec, rank: RankSpec) -> Mapping[str, str]:
    on_node = [other.rank for other in spec.ranks if other.node == rank.node]
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str(on_node.index(rank.rank)),
        "WORLD_SIZE": str(len(spec.ranks)),
        "MASTER_ADDR": spec.master_address,
        "MASTER_PORT": str(spec.master_port),
        **device_env((rank.device,)),
    }
