"""Level 1: discovery and readings against a fake of the vendor's driver, which the plugin's own tests supply."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from hetero_llm.plugin import Device, Discovery, EngineUnfit, Health, PoolWish
from hetero_llm.testing import samples, shapes
from hetero_llm.testing.base import Contract
from hetero_llm.testing.levels import at_level
from hetero_llm.testing.observation import DISCOVERY_DEADLINE_S, observe_hanging

_ALWAYS = ("kind", "accelerator", "uid", "index", "memory_bytes", "health")
_PLACES = (0, 1)


class FakesContract(Contract):
    """With a driver in place, even a sick one, a backend finds what is there and nothing else."""

    @at_level(1)
    def test_the_fake_devices_are_found_as_they_are(self) -> None:
        self.need("fake_devices", "discovery")
        with self.fake_devices() as expected:
            assert len(expected) >= 2, "fake_devices() must have two devices, to see whether one can hide the other"
            found = self.plugin().discover()
        assert not found.problems, f"nothing is wrong with the fake devices, yet: {found.problems}"
        self._check_found(found)
        assert len(found.devices) == len(expected), f"{len(found.devices)} of {len(expected)} devices were found"
        for seen, real in zip(found.devices, expected, strict=True):
            differing = _differences(seen, real)
            assert not differing, f"device {real.index} is not as it is: {differing}"

    @at_level(1)
    def test_a_second_discovery_gives_every_device_the_same_identity(self) -> None:
        self.need("fake_devices", "the stability of identities")
        with self.fake_devices():
            first, second = (self.plugin().discover().devices for _ in range(2))
        assert first, "no fake device was found"
        assert [(device.index, device.uid) for device in first] == [(device.index, device.uid) for device in second]

    @at_level(1)
    @pytest.mark.parametrize("place", _PLACES)
    def test_a_faulty_device_hides_and_renumbers_no_other(self, place: int) -> None:
        self.need("fake_devices", "a faulty device")
        with self.fake_devices(faulty=place) as expected:
            found = self.plugin().discover()
        self._check_found(found)
        others = [device for number, device in enumerate(expected) if number != place]
        seen = {device.index: device for device in found.devices}
        for real in others:
            assert real.index in seen, f"device {real.index} is gone because device {expected[place].index} is faulty"
            differing = _differences(seen[real.index], real)
            assert not differing, f"device {real.index} changed because another is faulty: {differing}"
        strangers = set(seen) - {device.index for device in expected}
        assert not strangers, f"devices {sorted(strangers)} exist only because another is faulty"

    @at_level(1)
    @pytest.mark.parametrize("place", _PLACES)
    def test_a_faulty_device_is_told_of_and_never_called_healthy(self, place: int) -> None:
        self.need("fake_devices", "a faulty device")
        with self.fake_devices(faulty=place) as expected:
            found = self.plugin().discover()
        faulty = next((device for device in found.devices if device.index == expected[place].index), None)
        told = faulty is not None and faulty.health is not Health.OK
        assert told or found.problems, (
            f"device {expected[place].index} is faulty and neither health nor a problem says so"
        )
        assert faulty is None or faulty.health is not Health.OK, (
            f"device {faulty.index} is faulty and called {faulty.health}"
        )

    @at_level(1)
    def test_usage_reads_every_device_in_the_order_asked(self) -> None:
        self.need("fake_devices", "usage()")
        with self.fake_devices():
            devices = tuple(reversed(self.plugin().discover().devices))
            readings = self.plugin().usage(devices)
        shapes.check_usage(devices, readings)

    @at_level(1)
    def test_usage_goes_on_when_a_device_is_faulty(self) -> None:
        self.need("fake_devices", "usage() of a faulty device")
        with self.fake_devices(faulty=0) as expected:
            readings = self.plugin().usage(tuple(expected))
        shapes.check_usage(expected, readings)

    @at_level(1)
    def test_discovery_and_usage_leave_no_context_open(self) -> None:
        self.need("fake_devices", "open contexts")
        self.need("open_contexts", "whether handles are closed")
        for faulty in (None, *_PLACES):
            with self.fake_devices(faulty=faulty) as expected:
                self.plugin().discover()
                assert self.open_contexts() == 0, f"after discover() with device {faulty} faulty"
                self.plugin().usage(tuple(expected))
                assert self.open_contexts() == 0, f"after usage() with device {faulty} faulty"

    @at_level(1)
    def test_doctor_speaks_of_a_faulty_machine_in_the_documented_shape(self) -> None:
        self.need("fake_devices", "doctor()")
        for faulty in (None, *_PLACES):
            with self.fake_devices(faulty=faulty):
                for check in self.plugin().doctor():
                    shapes.check_check(self.plugin().kind, check)

    @at_level(1)
    def test_engines_start_on_the_devices_that_were_found(self) -> None:
        self.need("fake_devices", "engines on found devices")
        with self.fake_devices():
            backend = self.plugin()
            devices = backend.discover().devices
            launch = backend.engine(samples.engine_spec(devices))
            group = backend.group(samples.group_spec(devices))
        shapes.check_launch(launch)
        assert backend.device_env(devices).items() <= launch.env.items()
        assert len(group.rank_env) == len(devices)

    @at_level(1)
    def test_a_driver_that_hangs_costs_the_deadline_and_leaves_nothing_behind(self) -> None:
        self.need("fake_hang", "a hanging driver")
        with self.fake_hang():
            run = observe_hanging(self.backend)
        assert not run.left_behind, f"still there after the discovery was killed: {run.left_behind}"
        if run.answer is not None:
            assert not run.answer.errors, (
                f"discover() must answer a hanging driver with a problem:\n{run.answer.errors}"
            )
            found = run.answer.discovery
            assert found is not None, "there is neither an answer nor an error"
            assert found.problems, f"the driver hangs and discover() says nothing about it, after {run.seconds:.1f} s"
            self._check_found(found)
        else:
            assert run.seconds >= DISCOVERY_DEADLINE_S, "discover() ended without an answer before its deadline"

    @at_level(1)
    def test_an_engine_of_another_version_is_refused_with_both_versions(self) -> None:
        self.need("fake_wrong_engine", "an engine of another version")
        with self.fake_wrong_engine() as (installed, needed):
            backend = self.plugin()
            said = [check.text for check in backend.doctor() if check.ok is False]
            said += [problem.text for problem in backend.discover().problems]
            devices = self.sample_devices(1)
            said += [item.reason for item in backend.check_model(samples.DENSE, devices[0].accelerator, PoolWish())]
            try:
                backend.engine(samples.engine_spec(devices))
            except EngineUnfit as error:
                said.append(f"{error.report.message}: {error.report.cause}")
        both = [text for text in said if installed in text and needed in text]
        assert both, f"engine {installed} is installed, {needed} is needed; nothing says so: {said}"

    def _check_found(self, found: Discovery) -> None:
        kind = self.plugin().kind
        shapes.check_devices(kind, found.devices)
        for problem in found.problems:
            shapes.check_problem(kind, problem)


def _differences(seen: Device, expected: Device) -> dict[str, str]:
    """Return the fields that differ: those that always count, and those the expectation sets."""
    differing = {}
    for field in fields(Device):
        wanted, value = getattr(expected, field.name), getattr(seen, field.name)
        if (field.name in _ALWAYS or wanted != _default(expected, field.name)) and value != wanted:
            differing[field.name] = f"{value!r}, not {wanted!r}"
    return differing


def _default(device: Device, name: str) -> object:
    field = next(field for field in fields(device) if field.name == name)
    return field.default_factory() if field.default_factory is not MISSING else field.default
