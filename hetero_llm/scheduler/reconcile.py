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
from hetero_llm.scheduler.resources import USABLE_HEALTH, has_labels, hold
from hetero_llm.scheduler.rules import KindRules


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """One Serve application of a model: equal replicas on one accelerator type.

    Attributes:
        nodes: nodes of one replica's group.
        labels: what is asked of those nodes' labels.
        wanted: replicas Serve is asked for.
        living: replicas, ready or not yet, on nodes that live.
        ready: those of the living that answer requests and stay.
        leaving: those of the living whose node is told to leave.
        retiring: those of the wanted that end as soon as their successors in other pools are ready.
        succeeds: some of its replicas are such successors.
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
    ready: int = 0
    leaving: int = 0
    retiring: int = 0
    succeeds: bool = False

    @property
    def missing(self) -> int:
        """Replicas for which Serve has to find a place."""
        return max(0, self.wanted - self.retiring - (self.living - self.leaving))

    @property
    def devices_per_node(self) -> int:
        """Devices one replica takes on each of its nodes."""
        return self.tp * self.pp // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do for one model.

    Attributes:
        counts: application to the number of replicas it should have from now on.
        retiring: application to the number of those that end once their successors are ready.
        replicas: new replicas, each with its place.
        reason: one sentence for a person.
    """

    counts: Mapping[str, int] = field(default_factory=dict)
    retiring: Mapping[str, int] = field(default_factory=dict)
    replicas: tuple[ReplicaPlan, ...] = ()
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A model as it is wanted and as it lives, and where its replicas could go.

    Attributes:
        nodes: all nodes; `held_by` of their devices is up to date.
        others: pools of other models; what Serve is about to use for them is not taken away.
    """

    facts: ModelFacts
    wishes: Sequence[PoolWish]
    pools: Sequence[Pool]
    nodes: Sequence[NodeInventory]
    rules: Mapping[str, KindRules]
    matrix: Matrix | None
    others: Sequence[Pool] = ()

    def free(self) -> tuple[NodeInventory, ...]:
        """Return the living nodes without what Serve is about to use."""
        return _reserved([node for node in self.nodes if node.alive], (*self.pools, *self.others))

    def plan(self, wish: PoolWish, nodes: Sequence[NodeInventory]) -> tuple[ReplicaPlan, ...]:
        """Return the replicas of `wish` that fit on `nodes`."""
        return make_plan(self.facts, wish, nodes, self.rules, self.matrix).replicas


def next_change(now: Situation) -> Change | None:
    """Return what should change now, None when all is as it should be or nothing can be done."""
    for move in _moves(now):
        if move.replicas:
            return move.change()
    if retired := _retired(now.pools):
        return retired
    for wish in now.wishes:
        if wish.replicas is None and (more := now.plan(wish, now.free())):
            return Change(replicas=more, reason=f"{len(more)} more fit and as many as fit are wanted")
    return None


def stranded(now: Situation) -> dict[str, int]:
    """Return application to the number of its replicas that no change can give a place."""
    left = {move.pool.app: move.lacking - len(move.replicas) for move in _moves(now)}
    return {app: count for app, count in left.items() if count > 0}


def places_lacking(pools: Sequence[Pool], nodes: Sequence[NodeInventory]) -> dict[str, int]:
    """Return application to the number of its replicas that have no place of their type on the living nodes now."""
    living = [node for node in nodes if node.alive]
    lacking = {pool.app: pool.missing - _places(pool, living) for pool in pools}
    return {app: count for app, count in lacking.items() if count > 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """What becomes of a pool's replicas that have no place of their type any more.

    Attributes:
        lacking: how many these are.
        replicas: their successors elsewhere, as many as fit.
        lost: how many successors replace a replica that is gone; the others replace one of a leaving node.
    """

    pool: Pool
    lacking: int
    replicas: tuple[ReplicaPlan, ...]
    lost: int

    def change(self) -> Change:
        pool, moved = self.pool, len(self.replicas)
        return Change(
            counts={pool.app: pool.wanted - self.lost} if self.lost else {},
            retiring={pool.app: pool.retiring + moved - self.lost} if moved > self.lost else {},
            replicas=self.replicas,
            reason=f"{moved} of {pool.wanted} replicas of {pool.app} have no {pool.accelerator} left",
        )


def _moves(now: Situation) -> Iterator[_Move]:
    """Yield a move for each pool that lacks places; a later one does not take what an earlier one was given."""
    free, lacking = now.free(), places_lacking(now.pools, now.nodes)
    for pool in now.pools:
        count, wish = lacking.get(pool.app, 0), _wish_of(pool, now.wishes)
        if count == 0:
            continue
        replicas: tuple[ReplicaPlan, ...] = ()
        if wish is not None:
            replicas = now.plan(replace(wish, replicas=count), _without(free, pool.kind, pool.accelerator))
        lost = min(len(replicas), max(0, pool.wanted - pool.living))
        yield _Move(pool=pool, lacking=count, replicas=replicas, lost=lost)
        free = hold(free, replicas)


def _retired(pools: Sequence[Pool]) -> Change | None:
    """Return the end of replicas whose successors are ready, or who are gone already."""
    all_ready = all(pool.ready >= pool.wanted - pool.retiring for pool in pools if pool.succeeds)
    for pool in pools:
        left = pool.wanted - pool.retiring
        if pool.retiring > 0 and (all_ready or pool.living <= left):
            reason = f"{pool.retiring} of {pool.wanted} replicas of {pool.app} have their successors elsewhere"
            return Change(counts={pool.app: left}, retiring={pool.app: 0}, reason=reason)
    return None


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
        needed[pool.kind, pool.accelerator] += pool.missing * pool.tp * pool.pp
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
