"""A backend whose engine is `engine_program.py`: real processes, leases and actors without an accelerator.

Found through a real entry point: `install` writes the metadata of a distribution into a folder, and whoever has that
folder on its path sees the plugin, Ray's workers included.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_llm.model import (
    MemoryEstimate,
    NodeInventory,
    Placement,
    Plan,
    ReplicaPlan,
)
from hetero_llm.plugin import (
    Backend,
    Device,
    Discovery,
    EngineFact,
    EngineLaunch,
    EngineSpec,
    GroupSetup,
    GroupSpec,
    Health,
    ModelFacts,
    PhaseMarker,
    PoolWish,
    Rejection,
    RootCausePattern,
    hookimpl,
)

KIND = "stub"
ACCELERATOR = "s1"
SUPPORT = Path(__file__).parent
ENGINE = SUPPORT / "engine_program.py"
PREFLIGHT = SUPPORT / "preflight_program.py"


class StubBackend(Backend):
    kind = KIND
    api_version = "1.0"
    other_visible_envs = ("CUDA_VISIBLE_DEVICES",)

    def discover(self) -> Discovery:
        return Discovery()

    def versions(self) -> Mapping[str, str | None]:
        return {}

    def device_env(self, devices: Sequence[Device]) -> Mapping[str, str]:
        return {"STUB_DEVICES": ",".join(device.uid for device in devices)}

    def group(self, spec: GroupSpec) -> GroupSetup:
        return GroupSetup(
            torch_backend="gloo",
            rank_env=tuple({"RANK": str(rank.rank)} for rank in spec.ranks),
            preflight_argv=(sys.executable, "-S", str(PREFLIGHT)) if len(spec.ranks) > 1 else None,
        )

    def engine(self, spec: EngineSpec) -> EngineLaunch:
        own = ("--served-model-name", spec.served_name, "--node-rank", spec.node_rank)
        return launch(spec.port, *own, *spec.extra_args, host=spec.host)

    def check_model(self, facts: ModelFacts, accelerator: str, wish: PoolWish) -> tuple[Rejection, ...]:
        return ()


@hookimpl
def hetero_llm_backends() -> Sequence[Backend]:
    return (StubBackend(),)


def launch(port: int, *flags: object, host: str = "127.0.0.1", **changes: object) -> EngineLaunch:
    """Return how to start the program, and how to read its log."""
    settings = {
        "argv": (sys.executable, "-uS", str(ENGINE), "--host", host, "--port", str(port), *map(str, flags)),
        "phases": (PhaseMarker(pattern=re.compile("Starting to load model"), phase="loading weights"),),
        "root_causes": (
            RootCausePattern(pattern=re.compile(r"no kernel for head size (\d+)"), message="head size {1} is not one"),
        ),
        "facts": (EngineFact(pattern=re.compile(r"KV cache size: ([\d,]+) tokens"), name="kv_tokens"),),
        "start_deadline_s": 60.0,
    }
    return EngineLaunch(**{**settings, **changes})


def install(folder: Path) -> None:
    """Make `folder`, on a path, provide this module as plugin `stub`."""
    info = folder / "hetero_llm_stub-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hetero-llm-stub\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[hetero_llm.backends]\nstub = stub_backend\n")


def node(devices: int, name: str = "here") -> NodeInventory:
    """Return a node whose devices are ``stub-0`` …; those of another node than "here" carry its name."""
    stem = "stub" if name == "here" else name
    return NodeInventory(
        node=name,
        host="here",
        address="127.0.0.1",
        kind=KIND,
        devices=tuple(
            Device(kind=KIND, accelerator=ACCELERATOR, uid=f"{stem}-{n}", index=n, health=Health.OK)
            for n in range(devices)
        ),
    )


def plan(model: str, groups: Sequence[Sequence[str]], nodes: int = 1) -> Plan:
    """Return a plan with one replica per group of device uids, each spread evenly over `nodes` nodes."""
    facts = ModelFacts(
        name=model,
        source=model,
        architecture="Stub",
        parameters=1,
        weights_bytes=2,
        layers=1,
        heads=1,
        kv_heads=1,
        head_dim=64,
        hidden_size=64,
        vocab_size=8,
        max_model_len=128,
        dtype="bfloat16",
    )
    memory = MemoryEstimate(weights_bytes=2, kv_bytes=1 << 20, overhead_bytes=0, per_device_bytes=2 + (1 << 20))
    replicas = (
        ReplicaPlan(
            id=f"{model}-{KIND}-{number}",
            kind=KIND,
            accelerator=ACCELERATOR,
            tp=len(group),
            pp=1,
            placement=tuple(
                Placement(
                    node=f"node{at}", devices=tuple(group[at * len(group) // nodes : (at + 1) * len(group) // nodes])
                )
                for at in range(nodes)
            ),
            memory=memory,
            kv_tokens=1024,
            max_model_len=128,
            why="the test says so",
        )
        for number, group in enumerate(groups)
    )
    return Plan(model=facts, feasible=True, replicas=tuple(replicas))
