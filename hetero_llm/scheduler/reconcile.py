"""What a running model should change: replicas that lost their place go elsewhere, and "as many as fit" grows.

Pure: pools as they are wanted and as they live, and the nodes, go in; at most one change per model comes out. Ray Serve
itself brings back a replica whose accelerator type is still free somewhere, so nothing is changed for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetero_llm.matrix import Matrix
from hetero_llm.model import Device, ModelFacts, NodeInventory, PoolWish, ReplicaPlan
from hetero_llm.scheduler.planner import make_plan
from hetero_llm.scheduler.resources import USABLE_HEALTH, has_labels
from hetero_llm.scheduler.rules import KindRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One Serve application of a model: equal replicas on one accelerator type.

    Attributes:
        wanted: replicas Serve is asked for.
        living: replicas, ready or not yet, on nodes that live.
        nodes: nodes of one replica's group.
        labels: what is asked of those nodes' labels.
    """

    app: str
    kind: str
    accelerator: str
    tp: int
    pp: int
    nodes: int = 1
    labels: Mapping[str, str] = field(default_factory=dict)
    wanted: int
    living: int

    @property
    def devices_per_node(self) -> int:
        """Devices one replica takes on each of its nodes."""
        return self.tp * self.pp // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do for one model.

    Attributes:
        counts: application to the number of replicas it should have from now on.
        replicas: new replicas, each with its place.
        reason: one sentence for a person.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    replicas: tuple[ReplicaPlan, ...] = ()
    reason: str


def next_change(
    facts: ModelFacts,
    wishes: Sequence[PoolWish],
    pools: Sequence[Pool],
    nodes: Sequence[NodeInventory],
    rules: Mapping[str, KindRules],
    matrix: Matrix | None,
    others: Sequence[Pool] = (),
) -> Change | None:
    """Return what should change now, None when all is as it should be or nothing can be done.

    Args:
        nodes: all nodes; `held_by` of their devices is up to date.
        others: pools of other models; what Serve is about to use for them is not taken away.
    """
    living = [node for node in nodes if node.alive]
    free = _reserved(living, (*pools, *others))
    for pool in pools:
        homeless = pool.wanted - pool.living - _places(pool, living)
        wish = _wish_of(pool, wishes)
        if homeless > 0 and wish is not None:
            elsewhere = _without(free, pool.kind, pool.accelerator)
            moved = make_plan(facts, replace(wish, replicas=homeless), elsewhere, rules, matrix).replicas
            if moved:
                reason = f"{len(moved)} of {pool.wanted} replicas of {pool.app} have no {pool.accelerator} left"
                return Change(counts={pool.app: pool.wanted - len(moved)}, replicas=moved, reason=reason)
    for wish in wishes:
        if wish.replicas is None and (more := make_plan(facts, wish, free, rules, matrix).replicas):
            return Change(replicas=more, reason=f"{len(more)} more fit and as many as fit are wanted")
    return None


def places_lacking(pools: Sequence[Pool], nodes: Sequence[NodeInventory]) -> dict[str, int]:
    """Return application to the number of its replicas that have no place on the living nodes now."""
    living = [node for node in nodes if node.alive]
    lacking = {pool.app: pool.wanted - pool.living - _places(pool, living) for pool in pools}
    return {app: count for app, count in lacking.items() if count > 0}


def _wish_of(pool: Pool, wishes: Sequence[PoolWish]) -> PoolWish | None:
    """Return the first wish this pool can have come from."""
    return next((wish for wish in wishes if _comes_from(pool, wish)), None)


def _comes_from(pool: Pool, wish: PoolWish) -> bool:
    kinds = not wish.kinds or pool.kind in wish.kinds
    shape = wish.tp in (None, pool.tp) and wish.pp in (None, pool.pp)
    return kinds and shape and wish.accelerator in (None, pool.accelerator) and wish.labels == pool.labels


def _places(pool: Pool, nodes: Sequence[NodeInventory]) -> int:
    """Return how many replicas of `pool` the free devices of its type could take."""
    per_node = [len(list(_free(node, pool))) // pool.devices_per_node for node in nodes]
    if pool.nodes == 1:
        return sum(per_node)
    # A group takes one share on each of several nodes; counted as groups can be formed greedily.
    groups, left = 0, Counter(dict(enumerate(per_node)))
    while sum(count > 0 for count in left.values()) >= pool.nodes:
        for node, _ in left.most_common(pool.nodes):
            left[node] -= 1
        groups += 1
    return groups


def _free(node: NodeInventory, pool: Pool) -> Iterator[Device]:
    if not has_labels(node, pool.labels):
        return
    for device in node.devices:
        if (device.kind, device.accelerator) == (pool.kind, pool.accelerator) and _is_free(device):
            yield device


def _is_free(device: Device) -> bool:
    return device.held_by is None and device.health in USABLE_HEALTH


def _without(nodes: Sequence[NodeInventory], kind: str, accelerator: str) -> tuple[NodeInventory, ...]:
    def keep(device: Device) -> bool:
        return (device.kind, device.accelerator) != (kind, accelerator)

    return tuple(replace(node, devices=tuple(filter(keep, node.devices))) for node in nodes)


def _reserved(nodes: Sequence[NodeInventory], pools: Sequence[Pool]) -> tuple[NodeInventory, ...]:
    """Return `nodes` without the free devices that Serve is about to use for replicas it brings back."""
    needed: Counter[tuple[str, str]] = Counter()
    for pool in pools:
        missing = max(0, pool.wanted - pool.living)
        needed[pool.kind, pool.accelerator] += missing * pool.tp * pool.pp
    kept = []
    for node in nodes:
        devices = []
        for device in node.devices:
            key = (device.kind, device.accelerator)
            if _is_free(device) and needed[key] > 0:
                needed[key] -= 1
            else:
                devices.append(device)
        kept.append(replace(node, devices=tuple(devices)))
    return tuple(kept)
