"""Level 0: discovery, versions, readings and checks on whatever machine this is, and the variables of a process."""

from __future__ import annotations

import pytest

from hetero_llm.plugin import Discovery
from hetero_llm.testing import shapes
from hetero_llm.testing.base import Contract
from hetero_llm.testing.observation import DISCOVERY_DEADLINE_S


class DiscoveryContract(Contract):
    """A backend asked on a machine with or without its hardware answers, in shape, and leaves nothing open."""

    def test_discovery_here_raises_nothing(self) -> None:
        problem = self.observed().errors.get("discover")
        assert problem is None, f"discover() must return problems, not raise; without hardware it is empty:\n{problem}"

    def test_discovery_here_answers_before_its_deadline(self) -> None:
        took_s = self.observed().discover_s
        assert took_s is not None, "discover() was not asked: importing the plugin failed"
        assert took_s < DISCOVERY_DEADLINE_S, f"discover() took {took_s:.1f} s of {DISCOVERY_DEADLINE_S:g} s"

    def test_devices_here_are_in_the_documented_shape(self) -> None:
        shapes.check_devices(self.plugin().kind, self._found().devices)

    def test_problems_here_say_what_to_do(self) -> None:
        for problem in self._found().problems:
            shapes.check_problem(self.plugin().kind, problem)

    def test_what_was_found_names_its_source(self) -> None:
        found = self._found()
        if found.devices:
            shapes.check_line("the source of the devices", found.source)

    def test_discovery_here_is_the_same_after_pickle_and_json(self) -> None:
        problem = self.observed().errors.get("round trip")
        assert problem is None, f"a discovery must be plain data:\n{problem}"

    def test_a_second_discovery_here_finds_the_same_devices(self) -> None:
        again = self.observed().again
        assert again is not None, f"the second discover() failed:\n{self.observed().errors.get('discover')}"
        first = [(device.index, device.uid, device.accelerator) for device in self._found().devices]
        assert [(device.index, device.uid, device.accelerator) for device in again.devices] == first

    def test_asking_here_leaves_no_device_open(self) -> None:
        left = self.observed().open_devices
        assert not left, f"still open after discover(), versions(), usage() and doctor(): {', '.join(left)}"

    def test_asking_here_loads_no_engine_library(self) -> None:
        loaded = self.observed().modules
        assert not loaded, (
            f"discover(), versions(), usage() or doctor() loads {', '.join(loaded)}; engines may, they not"
        )

    def test_versions_are_text_or_unknown(self) -> None:
        versions = self.observed().versions
        assert versions is not None, f"versions() failed:\n{self.observed().errors.get('versions')}"
        assert "plugin" in versions, f"versions() gives {', '.join(versions) or 'nothing'}; the plugin's own is missing"
        for name, version in versions.items():
            if version is not None:
                shapes.check_line(f"the version of {name}", version)

    def test_usage_here_reads_every_device_in_order(self) -> None:
        readings = self.observed().usage
        assert readings is not None, f"usage() failed:\n{self.observed().errors.get('usage')}"
        shapes.check_usage(self._found().devices, readings)

    def test_doctor_here_gives_a_way_out_for_what_fails(self) -> None:
        checks = self.observed().checks
        assert checks is not None, f"doctor() failed:\n{self.observed().errors.get('doctor')}"
        for check in checks:
            shapes.check_check(self.plugin().kind, check)
        names = [check.name for check in checks]
        assert len(set(names)) == len(names), f"a check's name appears twice: {names}"

    def test_the_variables_of_a_process_are_text_and_name_no_other_vendor(self) -> None:
        backend = self.plugin()
        env = backend.device_env(self.sample_devices(2))
        shapes.check_env("device_env()", env)
        strangers = set(env) & set(backend.other_visible_envs)
        assert not strangers, f"device_env() sets {', '.join(sorted(strangers))}, which it says to clear"
        own = backend.visible_devices_env
        assert own is None or own in env, f"device_env() does not set {own}"

    def test_ids_in_a_variable_ascend_whatever_the_order_of_the_devices(self) -> None:
        backend, devices = self.plugin(), self.sample_devices(4)
        own = backend.visible_devices_env
        if own is None:
            pytest.skip(f"{backend.kind} declares no visible_devices_env")
        straight = backend.device_env(devices)[own]
        ids = straight.split(",")
        assert "" not in ids, f"{own}={straight!r} has an empty entry"
        assert all(text == text.strip() for text in ids), f"{own}={straight!r} has blanks; runtimes stop reading there"
        if all(text.isdecimal() for text in ids):
            assert [int(text) for text in ids] == sorted({int(text) for text in ids}), (
                f"{own}={straight} is not ascending"
            )
            mixed = backend.device_env((devices[2], devices[0], devices[3], devices[1]))[own]
            assert mixed == straight, f"devices 2,0,3,1 give {own}={mixed}; runtimes want {straight}"

    def test_every_device_has_variables_of_its_own(self) -> None:
        backend, devices = self.plugin(), self.sample_devices(4)
        alone = [tuple(sorted(backend.device_env((device,)).items())) for device in devices]
        assert len(set(alone)) == len(alone), f"two devices give the same variables, so two ranks share one: {alone}"

    def test_the_same_devices_give_the_same_variables(self) -> None:
        backend, devices = self.plugin(), self.sample_devices(2)
        assert dict(backend.device_env(devices)) == dict(self.plugin().device_env(devices))

    def _found(self) -> Discovery:
        found = self.observed().discovery
        assert found is not None, f"discover() failed:\n{self.observed().errors}"
        return found
