"""The Ascend backend keeps the contract every plugin keeps, with a fake driver library where it needs a driver."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest
from fake_ascend import FakeChip, Machine, build_dcmi

from hetero_llm.plugin import Device, Health
from hetero_llm.testing import BackendContract, fake_distribution

CHIPS = tuple(
    FakeChip(card=n // 2, chip=n % 2, logical=n, physical=n, name="Ascend910", npu_name="9391", die=0xA0 + 8 * n)
    for n in range(4)
)


def expected(chip: FakeChip) -> Device:
    return Device(
        kind="ascend",
        accelerator="910_9391",
        uid="npu-" + "-".join(f"{chip.die + part:08x}" for part in range(5)),
        index=chip.logical,
        physical_index=chip.physical,
        card=chip.card,
        memory_bytes=chip.hbm << 20,
        free_bytes=(chip.hbm - chip.used) << 20,
        health=Health.OK,
    )


@contextmanager
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(prefix="hetero-llm-ascend-") as folder:
        made = Machine(Path(folder) / "machine")
        with mock.patch.dict(os.environ, made.environment()):
            os.environ.pop("ASCEND_RT_VISIBLE_DEVICES", None)
            yield made


class TestAscend(BackendContract):
    backend = "hetero_llm_ascend.plugin:AscendBackend"
    library: ClassVar[Path]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _driver_library(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        built = build_dcmi(tmp_path_factory.mktemp("dcmi"))
        if built is None:
            pytest.skip("there is no C compiler to build the fake driver library with")
        cls.library = built

    @contextmanager
    def fake_devices(self, faulty: int | None = None) -> Iterator[Sequence[Device]]:
        chips = [replace(chip, health=3) if place == faulty else chip for place, chip in enumerate(CHIPS)]
        with machine() as made:
            made.dcmi(self.library, chips)
            yield [expected(chip) for chip in CHIPS]

    @contextmanager
    def fake_hang(self) -> Iterator[None]:
        with machine() as made:
            made.dcmi(self.library, CHIPS, "hang dcmi_init")
            made.npu_smi({}, hang=("info",))
            yield

    @contextmanager
    def fake_wrong_engine(self) -> Iterator[tuple[str, str]]:
        with fake_distribution("vllm-ascend", "0.23.0"), fake_distribution("vllm", "0.22.1"):
            yield "0.22.1", "0.23.0"
