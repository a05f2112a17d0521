"""What must hold for every inventory and wish, not only for the cases somebody thought of."""

from __future__ import annotations

import dataclasses
import random
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CPU_RULES, GIB, QWEN_7B, QWEN_32B, YI_34B

from hetero_llm.model import Device, Health, NodeInventory, Plan, PoolWish
from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.planner import make_plan

RULES = {"cpu": CPU_RULES}
ACCELERATORS = {"cuda": ("H100-80GB", "A100-40GB"), "ascend": ("910B2",), "cpu": ("xeon-amx",)}

models = st.sampled_from((ALIASES["smollm2-135m"].facts, QWEN_7B, QWEN_32B, YI_34B))
wishes = st.builds(
    PoolWish,
    kinds=st.sampled_from(((), ("cpu",), ("cuda", "ascend"), ("ascend", "cpu", "cuda"))),
    tp=st.sampled_from((None, 1, 2, 3, 4, 8)),
    pp=st.sampled_from((None, 1, 2, 3)),
    replicas=st.sampled_from((None, 1, 2, 3, 5)),
    kv_cache_bytes=st.sampled_from((None, GIB // 4, 8 * GIB)),
    gpu_memory_utilization=st.sampled_from((0.5, 0.9, 1.0)),
    kv_cache_dtype=st.sampled_from((None, "fp8")),
    labels=st.sampled_from(({}, {}, {}, {"zone": "a"})),
)


@st.composite
def devices(draw: st.DrawFn, kind: str, name: str, index: int) -> Device:
    memory = draw(st.sampled_from((None, 8, 24, 40, 80)))
    free = draw(st.sampled_from((None, 0.1, 0.5, 0.95)))
    return Device(
        kind=kind,
        accelerator=draw(st.sampled_from(ACCELERATORS[kind])),
        uid=f"{name}/{index}",
        index=index,
        memory_bytes=None if memory is None else memory * GIB,
        free_bytes=None if memory is None or free is None else int(memory * free * GIB),
        health=draw(st.sampled_from((Health.OK, Health.OK, Health.OK, Health.DEGRADED, Health.FAILED))),
        numa=draw(st.sampled_from((None, 0, 1))),
        links=draw(st.sampled_from(({}, {"0": "nvlink"}, {"1": "hccs", "3": "sys"}))),
        held_by=draw(st.sampled_from((None, None, None, "other"))),
    )


@st.composite
def inventories(draw: st.DrawFn) -> tuple[NodeInventory, ...]:
    nodes = []
    for number in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(sorted(ACCELERATORS)))
        name = f"n{number}"
        count = draw(st.integers(0, 8))
        nodes.append(
            NodeInventory(
                node=name,
                host=draw(st.sampled_from((name, "box"))),
                address="10.0.0.1",
                versions={"vllm": draw(st.sampled_from(("0.23.0", "0.23.0", "0.24.0")))},
                labels=draw(st.sampled_from(({}, {"zone": "a"}))),
                alive=draw(st.sampled_from((True, True, True, False))),
                kind=kind,
                devices=tuple(draw(devices(kind, name, index)) for index in range(count)),
            )
        )
    return tuple(nodes)


def planned(facts, wish: PoolWish, nodes) -> Plan:
    return make_plan(facts, wish, nodes, RULES, None)


@given(facts=models, wish=wishes, nodes=inventories())
@settings(deadline=None)
def test_every_replica_gets_what_it_needs_and_nobody_elses(facts, wish, nodes):
    made = planned(facts, wish, nodes)
    by_uid = {device.uid: (node, device) for node in nodes for device in node.devices}
    used = [uid for replica in made.replicas for place in replica.placement for uid in place.devices]
    assert len(used) == len(set(used)), "a device is used twice"
    for replica in made.replicas:
        group = [by_uid[uid] for place in replica.placement for uid in place.devices]
        assert len(group) == replica.tp * replica.pp
        assert [node.node for node, _ in group] == [place.node for place in replica.placement for _ in place.devices]
        assert len({place.node for place in replica.placement}) == len(replica.placement)
        assert len({len(place.devices) for place in replica.placement}) == 1
        assert len({node.versions["vllm"] for node, _ in group}) == 1
        assert all(node.alive and wish.labels.items() <= node.labels.items() for node, _ in group)
        assert {(device.kind, device.accelerator) for _, device in group} == {(replica.kind, replica.accelerator)}
        assert replica.max_model_len <= replica.kv_tokens
        for _, device in group:
            assert device.health in (Health.OK, Health.DEGRADED)
            assert device.held_by is None
            budget = device.memory_bytes * wish.gpu_memory_utilization
            assert replica.memory.per_device_bytes <= budget
            assert device.free_bytes is None or replica.memory.per_device_bytes <= device.free_bytes


@given(facts=models, wish=wishes, nodes=inventories())
@settings(deadline=None)
def test_a_plan_is_feasible_exactly_when_all_replicas_have_a_place_and_otherwise_says_why(facts, wish, nodes):
    made = planned(facts, wish, nodes)
    assert made.feasible == (len(made.replicas) == wish.replicas if wish.replicas else bool(made.replicas))
    assert made.feasible or made.rejections
    told = {rejection.node for rejection in made.rejections}
    used = {place.node for replica in made.replicas for place in replica.placement}
    assert {node.node for node in nodes} <= told | used
    assert all(rejection.rule and rejection.reason for rejection in made.rejections)


@given(facts=models, wish=wishes, nodes=inventories(), seed=st.integers(0, 9))
@settings(deadline=None)
def test_the_order_of_nodes_and_devices_does_not_matter(facts, wish, nodes, seed):
    shuffled = [dataclasses.replace(node, devices=_shuffled(node.devices, seed)) for node in nodes]
    assert planned(facts, wish, _shuffled(tuple(shuffled), seed)) == planned(facts, wish, nodes)


@given(facts=models, wish=wishes, nodes=inventories(), data=st.data())
@settings(deadline=None)
def test_more_devices_never_make_a_feasible_plan_infeasible(facts, wish, nodes, data):
    if not nodes or not planned(facts, wish, nodes).feasible:
        return
    grown = data.draw(st.integers(0, len(nodes) - 1))
    node = nodes[grown]
    extra = data.draw(devices(node.kind, node.node, len(node.devices)))
    larger = dataclasses.replace(node, devices=(*node.devices, extra))
    assert planned(facts, wish, (*nodes[:grown], larger, *nodes[grown + 1 :])).feasible


@given(facts=models, wish=wishes, nodes=inventories(), more=inventories())
@settings(deadline=None)
def test_more_nodes_never_make_a_feasible_plan_infeasible(facts, wish, nodes, more):
    if not planned(facts, wish, nodes).feasible:
        return
    added = (dataclasses.replace(node, node=f"more-{node.node}", devices=_renamed(node)) for node in more)
    assert planned(facts, wish, (*nodes, *added)).feasible


@given(facts=models, wish=wishes, nodes=inventories())
@settings(deadline=None)
def test_what_is_said_to_fit_instead_fits(facts, wish, nodes):
    made = planned(facts, wish, nodes)
    for text in made.alternatives:
        flags = dict(re.findall(r"--(\w+) (\w+)", text.partition(" would fit")[0]))
        context = re.match(r"a context of (\d+) tokens", text)
        changed = dataclasses.replace(
            wish,
            **{name: int(flags[name]) for name in ("tp", "pp", "replicas") if name in flags},
            **({"kinds": (flags["kind"],)} if "kind" in flags else {}),
            **({"max_model_len": int(context[1])} if context else {}),
        )
        assert planned(facts, changed, nodes).feasible, text


def _renamed(node: NodeInventory) -> tuple[Device, ...]:
    return tuple(dataclasses.replace(device, uid=f"more-{device.uid}") for device in node.devices)


def _shuffled(items: tuple, seed: int) -> tuple:
    copy = list(items)
    random.Random(seed).shuffle(copy)
    return tuple(copy)
