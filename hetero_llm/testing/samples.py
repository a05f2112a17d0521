"""What the contract asks a backend about: devices, groups, engines and models that exist nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hetero_llm.plugin import Device, EngineSpec, GroupSpec, Health, ModelFacts, RankSpec

MEMORY_BYTES = 64 << 30

DENSE = ModelFacts(
    name="dense",
    source="example/dense",
    architecture="Qwen2ForCausalLM",
    parameters=7_000_000_000,
    weights_bytes=14_000_000_000,
    layers=28,
    heads=28,
    kv_heads=4,
    head_dim=128,
    hidden_size=3584,
    vocab_size=152_064,
    max_model_len=32_768,
    dtype="bfloat16",
    intermediate_size=18_944,
)

MODELS = (
    DENSE,
    replace(DENSE, name="half", dtype="float16"),
    replace(DENSE, name="full", dtype="float32"),
    replace(DENSE, name="fp8", quantization="fp8", dtype="bfloat16"),
    replace(DENSE, name="awq", quantization="awq", dtype="float16"),
    replace(DENSE, name="unheard-of", quantization="unheard-of", dtype="float4", architecture="NobodyForCausalLM"),
    replace(DENSE, name="odd-heads", head_dim=17, heads=9, kv_heads=3, intermediate_size=None),
    replace(DENSE, name="latent", latent_kv_size=576),
)
"""Models that differ in what a backend may refuse: dtype, quantisation, head size, cache."""


def devices(kind: str, count: int, like: Device | None = None) -> tuple[Device, ...]:
    """Return `count` healthy devices of one node, ascending by index.

    `like` is a device that really exists: its accelerator is taken over, and whether devices are CPU cores.
    """
    return tuple(
        Device(
            kind=kind,
            accelerator=like.accelerator if like else "example",
            uid=f"{kind}-example-{index}",
            index=index,
            physical_index=index,
            memory_bytes=MEMORY_BYTES,
            free_bytes=MEMORY_BYTES,
            health=Health.OK,
            cores=(index,) if like and like.cores else (),
        )
        for index in range(count)
    )


def engine_spec(held: Sequence[Device], port: int = 8123, **more: Any) -> EngineSpec:
    """Return an engine on `held` devices; `more` replaces fields of the specification."""
    fields: dict[str, Any] = {
        "model_path": "/models/example",
        "served_name": "example-model",
        "devices": tuple(held),
        "tp": len(held),
        "pp": 1,
        "host": "127.0.0.1",
        "port": port,
        "max_model_len": 4096,
    }
    return EngineSpec(**{**fields, **more})


def group_spec(held: Sequence[Device], nodes: int = 1, port: int = 29_500, deadline_s: float = 30.0) -> GroupSpec:
    """Return a group with one rank per device, spread evenly over `nodes` nodes; rank 0 is at 127.0.0.1."""
    per_node = len(held) // nodes
    ranks = tuple(
        RankSpec(
            rank=rank, node=f"node-{rank // per_node}", address=f"127.0.0.{1 + rank // per_node}", device=held[rank]
        )
        for rank in range(len(held))
    )
    return GroupSpec(
        ranks=ranks, tp=len(held), pp=1, master_address="127.0.0.1", master_port=port, deadline_s=deadline_s
    )
