"""The NVIDIA backend keeps the contract every plugin keeps, with a fake NVML inside the real pynvml."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from fake_nvml import GPU_IS_LOST, Library, hgx, plugged_in, uuid

from hetero_llm.plugin import Device, Health
from hetero_llm.testing import BackendContract


class TestCuda(BackendContract):
    backend = "hetero_llm_cuda.plugin:CudaBackend"

    @contextmanager
    def fake_devices(self, faulty: int | None = None) -> Iterator[Sequence[Device]]:
        healthy = hgx(2)
        cards = [replace(card, errors={"*": GPU_IS_LOST}) if n == faulty else card for n, card in enumerate(healthy)]
        self.library = Library(*cards)
        with pytest.MonkeyPatch.context() as patch, plugged_in(self.library):
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            yield [
                Device(
                    kind="cuda",
                    accelerator="H100-80GB",
                    uid=uuid(number),
                    index=number,
                    memory_bytes=card.memory,
                    health=Health.OK,
                )
                for number, card in enumerate(healthy)
            ]

    def open_contexts(self) -> int:
        return self.library.sessions
