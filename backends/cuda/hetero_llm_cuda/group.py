"""Process groups on NVIDIA devices: NCCL, with the interface stated and failures that surface as errors in seconds."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hetero_llm.plugin import EngineUnfit, GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.interfaces import interface_of
from hetero_llm_cuda.engine import OTHER_VISIBLE_ENVS, collective_env, device_env, is_instance

BACKEND = "nccl"


def group(spec: GroupSpec) -> GroupSetup:
    """Return the NCCL set-up of `spec`; more than one rank gets a pre-flight that really all-reduces.

    Raises:
        EngineUnfit: ranks on MIG instances, which CUDA gives no way to reach each other.
    """
    instances = [rank.device.accelerator for rank in spec.ranks if is_instance(rank.device)]
    if instances and len(spec.ranks) > 1:
        raise EngineUnfit(
            f"MIG instances ({instances[0]}) cannot form a group",
            cause="CUDA gives them no way to reach each other",
            next=("give --tp 1 --pp 1", "choose whole cards with --accelerator"),
        )
    program = (sys.executable, "-m", "hetero_llm.plugin.preflight", "--backend", BACKEND, "--device", "cuda")
    preflight = (*program, "--deadline-s", f"{spec.deadline_s:g}")
    return GroupSetup(
        torch_backend=BACKEND,
        rank_env=tuple(_rank_env(spec, rank) for rank in spec.ranks),
        preflight_argv=preflight if len(spec.ranks) > 1 else None,
        env_remove=(*OTHER_VISIBLE_ENVS, "RANK_TABLE_FILE", "TORCHELASTIC_RUN_ID", "GROUP_RANK", "NCCL_COMM_ID"),
    )


def _rank_env(spec: GroupSpec, rank: RankSpec) -> Mapping[str, str]:
    """Return the variables of one rank. It sees the devices of all ranks on its node and takes its own by number."""
    on_node = [other for other in spec.ranks if other.node == rank.node]
    return {
        "RANK": str(rank.rank),
        "LOCAL_RANK": str([other.rank for other in on_node].index(rank.rank)),
        "WORLD_SIZE": str(len(spec.ranks)),
        "MASTER_ADDR": spec.master_address,
        "MASTER_PORT": str(spec.master_port),
        **device_env([other.device for other in on_node]),
        **collective_env(_interface(spec, rank)),
        # An error of NCCL is raised where it is waited for, not by a watchdog that ends the process without a word.
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": f"{max(1, round(spec.deadline_s))}",
    }


def _interface(spec: GroupSpec, rank: RankSpec) -> str | None:
    """Return the interface the others reach this rank on: loopback's on one node, else that of its own address."""
    one_node = len({other.node for other in spec.ranks}) == 1
    return interface_of(spec.master_address if one_node else rank.address)
