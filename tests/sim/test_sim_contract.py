"""The simulated backend keeps the contract every plugin keeps."""

import os
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hetero_llm.plugin import Device, Health
from hetero_llm.testing import BackendContract


@pytest.fixture(autouse=True)
def no_settings_of_the_developer(monkeypatch):
    if os.environ.get("HETERO_LLM_CONTRACT_LEVEL") != "2":
        for name in [name for name in os.environ if name.startswith("HETERO_LLM_SIM_")]:
            monkeypatch.delenv(name)


class TestSim(BackendContract):
    backend = "hetero_llm_sim.plugin:SimBackend"

    def sample_devices(self, count):
        return tuple(replace(device, accelerator="fast") for device in super().sample_devices(count))

    @contextmanager
    def fake_devices(self, faulty=None):
        names = ["fast:failed" if place == faulty else "fast" for place in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HETERO_LLM_SIM_DEVICES", ",".join(names))
            patch.setenv("HETERO_LLM_SIM_NODE", "here")
            yield [
                Device(
                    kind="sim",
                    accelerator="fast",
                    uid=f"sim-here-{index}",
                    index=index,
                    memory_bytes=80 << 30,
                    health=Health.OK,
                    simulated=True,
                )
                for index in range(2)
            ]

    def tiny_model(self, folder):
        return folder
