"""The pre-flight of a group on one node, from its ranks to the verdict, as `EngineReplica` puts it together."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hetero_llm.cluster.group import excused, run_ranks
from hetero_llm.cluster.group_verdict import GroupReport, judge
from hetero_llm.plugin import GroupSetup, GroupSpec, RootCausePattern


def run_preflight(
    setup: GroupSetup,
    spec: GroupSpec,
    *,
    hints: Sequence[RootCausePattern] = (),
    cancelled: threading.Event | None = None,
) -> GroupReport:
    """Run the pre-flight of a group whose ranks are all on this node, unless it needs none.

    Args:
        setup: from the backend's `group`, on this node.
        spec: the group.
        hints: patterns that put a library's cryptic line into words.
        cancelled: when set, the ranks are stopped at once.

    Raises:
        GroupPreflightFailed: see `judge`.
        ValueError: the group is spread over nodes; each runs `run_ranks` then, and one judges all outcomes.
    """
    if (excuse := excused(setup, spec)) is not None:
        return GroupReport(torch_backend=setup.torch_backend, not_run=excuse)
    nodes = {rank.node for rank in spec.ranks}
    if len(nodes) != 1:
        raise ValueError(f"the group is on {len(nodes)} nodes: {', '.join(sorted(nodes))}")
    return judge(setup, spec, run_ranks(setup, spec, node=nodes.pop(), hints=hints, cancelled=cancelled))
