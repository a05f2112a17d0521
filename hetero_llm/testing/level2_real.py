"""Level 2: the real thing. Devices of this machine, an engine that generates, ranks that meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_llm.plugin import Device, Health
from hetero_llm.testing import samples
from hetero_llm.testing.base import Contract
from hetero_llm.testing.levels import at_level
from hetero_llm.testing.real_engine import free_port, run_preflight, running
from hetero_llm.testing.tiny_model import MAX_MODEL_LEN

_PREFLIGHT_DEADLINE_S = 60.0
_KILL_AFTER_S = 90.0
_KV_CACHE_BYTES = 1 << 27


class RealContract(Contract):
    """On a machine with its hardware a backend finds it, serves on it, and connects it."""

    @at_level(2)
    def test_the_devices_of_this_machine_are_found(self) -> None:
        devices = self._devices(1)
        for device in devices:
            assert device.memory_bytes is not None, f"the memory of {device.uid} was not measured"

    @at_level(2)
    def test_an_engine_starts_on_a_device_and_generates_a_token(self, tmp_path: Path) -> None:
        device, port = self._devices(1)[0], free_port()
        spec = samples.engine_spec(
            (device,),
            port=port,
            model_path=str(self.tiny_model(tmp_path)),
            max_model_len=MAX_MODEL_LEN,
            kv_cache_bytes=_KV_CACHE_BYTES,
            extra_args=self.engine_args,
        )
        launch = self.plugin().engine(spec)
        with running(launch, port, tmp_path) as engine:
            assert engine.first_token(spec.served_name) == 1, engine.why()
            seen = [marker.phase for marker in launch.phases if any(map(marker.pattern.search, engine.log_lines()))]
            assert seen or not launch.phases, f"no phase of {[m.phase for m in launch.phases]} shows in its log"

    @at_level(2)
    def test_two_devices_meet_in_the_pre_flight(self, tmp_path: Path) -> None:
        self.need_capability("forms_groups")
        spec = samples.group_spec(self._devices(2), port=free_port(), deadline_s=_PREFLIGHT_DEADLINE_S)
        setup = self.plugin().group(spec)
        endings = run_preflight(setup, _KILL_AFTER_S, tmp_path)
        assert [status for status, _ in endings] == [0, 0], (
            f"the ranks did not meet over {setup.torch_backend}: {endings}"
        )

    def _devices(self, count: int) -> tuple[Device, ...]:
        """Return `count` healthy devices of this machine; skip the test when there are fewer."""
        found = self.plugin().discover()
        healthy = [device for device in found.devices if device.health is Health.OK]
        if len(healthy) < count:
            said = "; ".join(problem.text for problem in found.problems)
            pytest.skip(f"{len(healthy)} healthy {self.plugin().kind} devices here, {count} are needed {said}".strip())
        return tuple(healthy[:count])
