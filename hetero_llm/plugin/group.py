"""What the core asks of a backend about groups: how the ranks of one replica find each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_llm.model import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """One rank of a group: its number, its node's name and address, and its device."""

    rank: int
    node: str
    address: str
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSpec:
    """The ranks of one replica and where they meet.

    Attributes:
        ranks: ascending by rank; ``len(ranks) == tp * pp``.
        master_address: address of rank 0.
        master_port: free TCP port at that address.
        deadline_s: seconds the pre-flight may take from its start.
    """

    ranks: tuple[RankSpec, ...]
    tp: int
    pp: int
    master_address: str
    master_port: int
    deadline_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSetup:
    """TP/PP process-group set-up of a kind.

    Attributes:
        torch_backend: name for ``torch.distributed.init_process_group``, never changed silently.
        rank_env: variables of each rank, by position; they are set before the rank's process starts.
        preflight_argv: program run once per rank with its `rank_env` before the engine starts. The ranks meet over
            `torch_backend`, all-reduce a known vector and exit 0, or print one line of cause on stderr and exit 1.
            ``python -m hetero_llm.plugin.preflight`` is such a program for every backend of torch.distributed.
            None when a group of this shape needs no pre-flight (one rank).
        env_remove: variables that must not reach the ranks.
    """

    torch_backend: str
    rank_env: tuple[Mapping[str, str], ...]
    preflight_argv: tuple[str, ...] | None = None
    env_remove: tuple[str, ...] = field(default=())
