"""The simulated engine in the place of another kind's: on pretended devices only, with the real backend's flags."""

import sys
from dataclasses import replace

import pytest
import stub_backend
from hetero_llm_sim.engine import stand_in
from hetero_llm_sim.options import read_options
from hetero_llm_sim.plugin import SimBackend

from hetero_llm.cluster.stand_in import engine_launch
from hetero_llm.errors import EngineFailed
from hetero_llm.plugin import Backend, Device, EngineLaunch, EngineSpec
from hetero_llm.plugin.manager import load_plugins

REAL = EngineLaunch(
    argv=(sys.executable, "-m", "vendor", "serve", "/m", "--port", "0", "--max-model-len", "512", "--block-size", "128",
          "--distributed-executor-backend", "mp", "--tensor-parallel-size", "2"),
    env={"ASCEND_RT_VISIBLE_DEVICES": "0,1"},
    env_remove=("CUDA_VISIBLE_DEVICES",),
)  # fmt: skip


class Vendor(stub_backend.StubBackend):
    def engine(self, spec: EngineSpec) -> EngineLaunch:
        return REAL


def device(index: int, **changes: object) -> Device:
    made = Device(kind="ascend", accelerator="910B2", uid=f"u{index}", index=index, simulated=True, stand_in="sim")
    return replace(made, **changes)


def spec(*devices: Device) -> EngineSpec:
    return EngineSpec(
        model_path="/m",
        served_name="m",
        devices=devices,
        tp=len(devices),
        pp=1,
        host="127.0.0.1",
        port=0,
        max_model_len=512,
    )


def test_the_real_backends_flags_and_environment_are_kept() -> None:
    launch = stand_in(REAL, spec(device(0), device(1)))
    assert launch.argv[:4] == (sys.executable, "-m", "hetero_llm_sim.engine", "serve")
    assert launch.env["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"
    assert launch.env_remove == ("CUDA_VISIBLE_DEVICES",)
    options = read_options(launch.argv[3:])
    facts = options.settings.facts
    assert (facts["accelerator"], facts["tp"], options.settings.profile.block_tokens) == ("910B2", 2, 128)
    assert options.settings.limits.max_model_len == 512
    assert options.ignored == ("--distributed-executor-backend", "mp")


def test_a_real_device_gets_the_real_engine() -> None:
    real = device(0, simulated=False, stand_in=None)
    assert engine_launch(Vendor(), load_plugins(), spec(real)) is REAL


def test_a_stand_in_named_on_a_real_device_has_no_effect() -> None:
    assert engine_launch(Vendor(), load_plugins(), spec(device(0, simulated=False))) is REAL


def test_pretended_devices_get_the_engine_that_stands_in() -> None:
    launch = engine_launch(Vendor(), load_plugins(), spec(device(0), device(1)))
    assert launch.argv[2] == "hetero_llm_sim.engine"


def test_a_simulated_kind_of_its_own_gets_its_own_engine() -> None:
    own = Device(kind="sim", accelerator="fast", uid="s", index=0, simulated=True)
    launch = engine_launch(SimBackend(), load_plugins(), spec(own))
    assert launch.argv[2] == "hetero_llm_sim.engine"


def test_pretended_and_real_devices_are_never_mixed() -> None:
    with pytest.raises(EngineFailed, match="sim and the kind's own"):
        engine_launch(Vendor(), load_plugins(), spec(device(0), device(1, simulated=False, stand_in=None)))


def test_a_real_engine_does_not_stand_in_for_another() -> None:
    with pytest.raises(EngineFailed, match="cpu"):
        engine_launch(Vendor(), load_plugins(), spec(device(0, stand_in="cpu")))


def test_by_default_a_backend_stands_in_for_nobody() -> None:
    assert Backend.stand_in(stub_backend.StubBackend(), REAL, spec(device(0))) is None
