"""Inventories and models for planner tests, in few words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from hetero_llm.model import Device, Health, ModelFacts, NodeInventory, PoolWish, Rejection
from hetero_llm.scheduler.rules import KindRules

GIB = 1 << 30


def node(
    name: str,
    kind: str,
    accelerator: str,
    count: int,
    memory_gib: float,
    *,
    free_gib: float | None = None,
    held: Mapping[int, str] | None = None,
    failed: Collection[int] = (),
    per_card: int = 1,
    alive: bool = True,
    host: str | None = None,
    islands: Sequence[Collection[int]] = (),
    link: str = "nvlink",
    numa: Sequence[int] = (),
    labels: Mapping[str, str] | None = None,
    **versions: str,
) -> NodeInventory:
    """Return a node with `count` equal devices. `held`, `failed`, and the `islands` that `link` joins, go by index."""
    devices = tuple(
        Device(
            kind=kind,
            accelerator=accelerator,
            uid=f"{name}/{index}",
            index=index,
            card=index // per_card,
            memory_bytes=int(memory_gib * GIB),
            free_bytes=None if free_gib is None else int(free_gib * GIB),
            health=Health.FAILED if index in failed else Health.OK,
            numa=numa[index] if numa else None,
            links={str(peer): link for island in islands if index in island for peer in island if peer != index},
            held_by=(held or {}).get(index),
        )
        for index in range(count)
    )
    return NodeInventory(
        node=name,
        host=host or name,
        address="10.0.0.1",
        kind=kind,
        devices=devices,
        alive=alive,
        versions=versions,
        labels=labels or {},
    )


def model(
    name: str, parameters: int, *, heads: int, kv_heads: int, layers: int, width: int, context: int
) -> ModelFacts:
    """Return a bf16 model of the Qwen2 kind with head size 128."""
    return ModelFacts(
        name=name,
        source=name,
        architecture="Qwen2ForCausalLM",
        parameters=parameters,
        weights_bytes=2 * parameters,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        hidden_size=128 * heads,
        intermediate_size=width,
        vocab_size=152_064,
        max_model_len=context,
        dtype="bfloat16",
    )


def accept(facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
    """Refuse nothing."""
    return ()


CPU_RULES = KindRules(
    native_resource=None,
    check=accept,
    overhead_bytes=lambda facts, tp, pp: 750_000_000 + 1_450_000_000 // (tp * pp),
    block_size=128,
    default_kv_bytes=4 * GIB,
)

QWEN_7B = model("qwen2.5-7b", 7_615_616_512, heads=28, kv_heads=4, layers=28, width=18_944, context=32_768)
YI_34B = model("yi-34b", 34_388_917_248, heads=56, kv_heads=8, layers=60, width=20_480, context=4096)
QWEN_32B = model("qwen2.5-32b", 32_763_876_352, heads=40, kv_heads=8, layers=64, width=27_648, context=32_768)
