"""Ascend devices on machines made of fakes at the driver boundary: a C library, npu-smi, an acl module, /dev."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from fake_ascend import SAMPLES, FakeChip, Machine, build_dcmi
from hetero_llm_ascend import devnodes, discovery, npu_smi
from hetero_llm_ascend.chip import MIB

from hetero_llm.plugin import Device, Discovery, Health

HOST = "npu-a"
CARDS = tuple(FakeChip(card=n, logical=n, physical=n, bus=0x10 + n, die=0xA000 + 16 * n) for n in range(8))
INFO, MAP, BOARD = "info", "info -m", "info -t board -i 0 -c 0"
SICK = ("init -8005",)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_dcmi(tmp_path_factory.mktemp("dcmi"))
    if built is None:
        pytest.skip("there is no C compiler to build the fake driver library with")
    return built


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "machine")
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    return made


def discover(machine: Machine, **environ: str) -> Discovery:
    return discovery.discover(root=machine.root, environ=environ, host=HOST)


def ids(found: Discovery) -> list[tuple[int, int | None, int | None]]:
    return [(device.index, device.physical_index, device.card) for device in found.devices]


def texts(found: Discovery) -> str:
    return "\n".join(problem.text for problem in found.problems)


# -- nothing here ------------------------------------------------------------------------------------------------------


def test_an_absent_vendor_is_nothing_at_all(machine: Machine) -> None:
    assert discover(machine) == Discovery()


def test_a_display_chip_of_the_vendor_for_server_management_is_no_npu(machine: Machine) -> None:
    machine.pci("0000:07:00.0", kind="0x030000")
    assert discover(machine) == Discovery()


def test_an_accelerator_of_another_vendor_is_no_npu(machine: Machine) -> None:
    machine.pci("0000:07:00.0", vendor="0x10de")
    assert discover(machine) == Discovery()


def test_a_tool_that_says_there_is_no_card_ends_the_search(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_none.txt"})
    machine.acl(ACL.replace("COUNT", "3"))
    assert discover(machine) == Discovery()


def test_a_toolkit_without_any_npu_is_no_problem(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(machine.python))
    machine.acl(ACL.replace("COUNT", "0").replace("init = 0", "init = 507008"))
    assert discover(machine) == Discovery()


def test_a_container_that_sees_the_hosts_bus_and_was_given_no_npu_has_no_problem(machine: Machine) -> None:
    machine.pci("0000:c1:00.0")
    (machine.root / ".dockerenv").touch()
    assert discover(machine) == Discovery()


# -- DCMI, the first source --------------------------------------------------------------------------------------------


def test_the_driver_library_is_asked_first_and_named(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    machine.npu_smi({INFO: "info_910B2_24.1.0.3.txt"})
    machine.nodes(*range(8))
    found = discover(machine)
    assert (found.source, found.problems) == ("dcmi", ())
    assert ids(found) == [(n, n, n) for n in range(8)]


def test_a_device_has_all_that_is_known_of_its_chip(machine: Machine, library: Path) -> None:
    machine.dcmi(library, [replace(CARDS[0], bus=0xC1), CARDS[1]], "topo 0 0 1 0 3")
    machine.pci("0000:c1:00.0", numa=6)
    assert discover(machine).devices[0] == Device(
        kind="ascend",
        accelerator="910B2",
        uid="npu-0000a000-0000a001-0000a002-0000a003-0000a004",
        index=0,
        physical_index=0,
        card=0,
        memory_bytes=65536 * MIB,
        free_bytes=62536 * MIB,
        health=Health.OK,
        numa=6,
        links={"1": "hccs"},
    )


def test_devices_are_ascending_by_logical_number_whatever_the_order_of_cards(machine: Machine, library: Path) -> None:
    machine.dcmi(library, [FakeChip(card=0, logical=1, physical=5), FakeChip(card=32, logical=0, physical=7)])
    assert ids(discover(machine)) == [(0, 7, 32), (1, 5, 0)]


def test_a_failed_card_is_listed_and_the_others_keep_their_numbers(machine: Machine, library: Path) -> None:
    cards = [*CARDS[:3], FakeChip(card=3, logical=3, physical=3, health=3), *CARDS[4:]]
    machine.dcmi(library, cards)
    found = discover(machine)
    assert [device.index for device in found.devices] == list(range(8))
    assert [device.health for device in found.devices].count(Health.FAILED) == 1
    assert found.devices[3].health is Health.FAILED


def test_a_card_that_fails_the_whole_pass_elsewhere_is_one_problem_here(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "fail dcmi_get_device_num_in_card 3 -8008")
    found = discover(machine)
    assert [device.index for device in found.devices] == [0, 1, 2, 4, 5, 6, 7]
    assert len(found.problems) == 1
    assert "NPU 3" in found.problems[0].text
    assert found.problems[0].next


def test_a_chip_the_runtime_does_not_count_is_last_failed_and_told(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "fail dcmi_get_device_logic_id 2 -8255")
    found = discover(machine)
    assert [device.index for device in found.devices] == [0, 1, 3, 4, 5, 6, 7, 8]
    assert [device.card for device in found.devices] == [0, 1, 3, 4, 5, 6, 7, 2]
    assert found.devices[-1].health is Health.FAILED
    assert "NPU 2 chip 0 (910B2, health ok) has no logical number" in texts(found)


def test_memory_is_never_made_up_from_a_name(machine: Machine, library: Path) -> None:
    machine.dcmi(library, [FakeChip(card=0, hbm=0, name="910B4")])
    (device,) = discover(machine).devices
    assert (device.accelerator, device.memory_bytes, device.free_bytes) == ("910B4", None, None)


def test_what_the_library_prints_does_not_disturb_the_answer(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    assert len(discover(machine).devices) == 8


def test_an_engine_of_another_version_is_told_beside_the_devices(
    machine: Machine, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("vllm_ascend", "0.23.0"), ("vllm", "0.22.1")):
        info = machine.python / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(machine.python))
    machine.dcmi(library, CARDS)
    found = discover(machine)
    assert len(found.devices) == 8
    (problem,) = found.problems
    assert (problem.code, problem.text) == ("HL504", "vllm-ascend 0.23.0 needs vLLM 0.23.0, installed is vLLM 0.22.1")


# -- the other sources, when the one before fails ----------------------------------------------------------------------


def test_a_driver_library_that_fails_hands_over_to_npu_smi_and_is_told(machine: Machine, library: Path) -> None:
    machine.dcmi(library, (), *SICK)
    machine.npu_smi({INFO: "info_910B2_24.1.0.3.txt", MAP: "info-m_910B2.txt"})
    found = discover(machine)
    assert found.source == "npu-smi"
    assert "dcmi_init: the driver is not loaded" in texts(found)
    assert "the devices were read from npu-smi" in texts(found)


def test_a_driver_library_that_hangs_costs_its_deadline_and_hides_nothing(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "hang dcmi_init")
    machine.npu_smi({INFO: "info_910B4_26.0.rc1.txt", MAP: "\tNPU ID\n"})
    began = time.monotonic()
    found = discover(machine)
    assert time.monotonic() - began < discovery.DEADLINE_S
    assert len(found.devices) == 2
    assert "dcmi did not answer within 3.0 s" in texts(found)


def test_a_driver_library_that_crashes_hides_nothing(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "crash dcmi_get_card_list")
    machine.npu_smi({INFO: "info_910B4_26.0.rc1.txt"})
    found = discover(machine)
    assert len(found.devices) == 2
    assert "dcmi failed: ended by signal 6" in texts(found)


def test_a_driver_library_that_cannot_be_loaded_is_told(machine: Machine) -> None:
    (machine.lib / "libdcmi.so").write_text("no library")
    machine.nodes(0)
    found = discover(machine)
    assert "libdcmi.so cannot be loaded" in texts(found)
    assert found.source == "/dev"


def test_without_the_driver_library_npu_smi_is_no_second_best(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B3_container.txt", MAP: "info-m_910B3_container.txt"})
    found = discover(machine)
    assert (found.source, found.problems) == ("npu-smi", ())
    assert ids(found) == [(0, None, 3), (1, None, 6)]


def test_logical_numbers_come_from_the_map_and_a_chip_that_it_lacks_is_unusable(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B2_24.1.0.3.txt", MAP: "info-m_910B2.txt"})
    found = discover(machine)
    assert ids(found) == [(0, None, 0), (1, None, 1), (2, None, 5), (3, None, 2)]
    assert [device.health for device in found.devices] == ["ok", "ok", "ok", "failed"]
    assert "NPU 2 chip 0 (910B2, health degraded) has no logical number" in texts(found)


def test_a_pair_of_dies_shares_its_card_and_the_exact_part_is_asked_for(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_A3_910_93_25.5.1.txt", MAP: "info-m_A3.txt", BOARD: "info-t-board_A3.txt"})
    found = discover(machine)
    assert ids(found) == [(0, 0, 0), (1, 1, 0), (2, 8, 4), (3, 9, 4)]
    assert {device.accelerator for device in found.devices} == {"910_9391"}
    assert found.problems == ()


def test_chips_of_one_card_that_share_a_bus_address_have_identities_of_their_own(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_310P3_duo_25.2.0.txt", MAP: "info-m_310P3_duo.txt"})
    found = discover(machine)
    assert [device.card for device in found.devices] == [2, 2, 8, 8]
    assert len({device.uid for device in found.devices}) == 4
    assert [device.health for device in found.devices] == ["ok", "ok", "ok", "failed"]


def test_a_310p_is_numbered_by_its_own_table_when_there_is_no_map(machine: Machine) -> None:
    listing = (SAMPLES / "info_310P3_24.1.0.1.txt").read_text()
    listing = listing.replace("| 0       0  ", "| 0       9  ").replace("| 0       1  ", "| 0       0  ")
    machine.npu_smi({INFO: listing.replace("| 0       9  ", "| 0       1  ", 1)})
    assert ids(discover(machine))[:3] == [(0, None, 32), (1, None, 0), (2, None, 96)]


def test_a_map_counts_more_than_the_number_in_the_table(machine: Machine) -> None:
    mapped = (SAMPLES / "info-m_310P3_duo.txt").read_text().splitlines(keepends=True)
    machine.npu_smi({INFO: "info_310P3_duo_25.2.0.txt", MAP: "".join(line for line in mapped if "8     " not in line)})
    found = discover(machine)
    assert [(device.index, device.card) for device in found.devices] == [(0, 2), (1, 2), (2, 8), (3, 8)]
    assert [device.health for device in found.devices] == ["ok", "ok", "failed", "failed"]
    assert len(found.problems) == 2


def test_a_950_is_numbered_by_place_and_has_the_physical_numbers_of_its_map(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_950_25.7.rc1.txt", MAP: "info-m_950.txt"})
    found = discover(machine)
    assert ids(found) == [(0, 0, 0), (1, 1, 1), (2, 3, 3)]
    assert found.problems == ()
    assert {device.accelerator for device in found.devices} == {"950PR"}


def test_numbers_that_are_only_the_lists_order_are_told(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B4_26.0.rc1.txt"})
    found = discover(machine)
    assert [device.index for device in found.devices] == [0, 1]
    assert "the logical numbers are those of the list's order" in texts(found)


def test_the_tools_exit_status_says_nothing(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B3_container.txt", MAP: "info-m_910B3_container.txt"}, status=1)
    assert len(discover(machine).devices) == 2


def test_a_tool_that_hangs_costs_its_deadline_and_becomes_a_problem(machine: Machine) -> None:
    machine.npu_smi({}, hang=(INFO,))
    machine.nodes(0, 1)
    found = discover(machine)
    assert "npu-smi info did not end within" in texts(found)
    assert len(found.devices) == 2


def test_a_map_that_hangs_leaves_the_devices(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B4_26.0.rc1.txt"}, hang=(MAP,))
    found = discover(machine)
    assert len(found.devices) == 2
    assert "npu-smi info -m did not end within" in texts(found)


@pytest.mark.parametrize(
    ("sample", "words"),
    [("error_-8005.txt", "the driver is not loaded"), ("error_-8020.txt", "taken exclusively by another container")],
)
def test_an_error_of_the_tool_is_present_and_unusable_in_words(machine: Machine, sample: str, words: str) -> None:
    machine.npu_smi({INFO: sample})
    found = discover(machine)
    assert found.devices == ()
    (problem,) = found.problems
    assert problem.text.startswith("present, unusable: npu-smi info says: ")
    assert words in problem.text
    assert problem.code == "HL206"
    assert problem.next


def test_a_tool_in_its_usual_place_is_found_without_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "npu-smi"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr(npu_smi, "_USUAL_PLACES", str(tmp_path))
    assert npu_smi.tool_path({"PATH": "/nowhere"}) == str(tool)


# -- the runtime -------------------------------------------------------------------------------------------------------

ACL = """
    import os, sys
    LOG = os.environ["FAKE_DCMI"] + ".acl"
    class _Names: init = 0
    def note(text):
        with open(LOG, "a") as log: log.write(text + " ")
    def init(): return _Names.init
    def finalize(): note("finalize"); return 0
    def get_soc_name(): return "Ascend910B3"
    class rt:
        @staticmethod
        def get_device_count(): return (COUNT, 0)
        @staticmethod
        def set_device(index): note(f"set{index}"); return 0 if index != 1 else 507033
        @staticmethod
        def reset_device(index): note(f"reset{index}"); return 0
        @staticmethod
        def get_mem_info(kind):
            if os.environ.get("ACL_MEMORY_RAISES"): raise RuntimeError("no memory information")
            return (60 << 30, 64 << 30, 0) if kind == 1 else (0, 0, 1)
"""


def acl_log(machine: Machine) -> list[str]:
    return (machine.root / "dcmi.txt.acl").read_text().split()


def test_the_runtime_is_asked_last_and_leaves_no_context_open(machine: Machine) -> None:
    machine.acl(ACL.replace("COUNT", "3"))
    machine.nodes(4, 5, 6)
    found = discover(machine)
    assert found.source == "acl"
    assert [device.accelerator for device in found.devices] == ["910B3"] * 3
    assert [(d.memory_bytes, d.free_bytes) for d in found.devices] == [
        (64 << 30, 60 << 30),
        (None, None),
        (64 << 30, 60 << 30),
    ]
    assert [device.health for device in found.devices] == ["ok", "failed", "ok"]
    assert acl_log(machine) == ["set0", "reset0", "set1", "set2", "reset2", "finalize"]
    assert "device 1 cannot be opened: acl.rt.set_device gives error 507033" in texts(found)


def test_the_runtime_closes_its_context_also_when_the_query_fails(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACL_MEMORY_RAISES", "1")
    machine.acl(ACL.replace("COUNT", "1"))
    machine.nodes(0)
    found = discover(machine)
    assert acl_log(machine) == ["set0", "reset0", "finalize"]
    assert "acl failed: RuntimeError: no memory information" in texts(found)


def test_the_runtime_counts_the_whole_machine_whatever_the_user_shows_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "2")
    count = '(1 if "ASCEND_RT_VISIBLE_DEVICES" in os.environ else 3)'
    machine.acl(ACL.replace("COUNT", count))
    machine.nodes(0, 1, 2)
    assert [device.index for device in discover(machine, ASCEND_RT_VISIBLE_DEVICES="2").devices] == [2]


# -- /dev and the bus --------------------------------------------------------------------------------------------------


def test_device_nodes_alone_are_present_unusable_and_why(machine: Machine) -> None:
    machine.nodes(10, 2, 0)
    found = discover(machine)
    assert found.source == "/dev"
    assert ids(found) == [(0, 0, None), (1, 2, None), (2, 10, None)]
    assert {device.health for device in found.devices} == {Health.UNKNOWN}
    assert {(device.accelerator, device.memory_bytes) for device in found.devices} == {("unknown", None)}
    (problem,) = found.problems
    assert problem.text.startswith("present, unusable: 3 device nodes")
    assert problem.code == "HL206"


def test_device_nodes_are_counted_by_number_and_the_manager_is_none(machine: Machine) -> None:
    machine.nodes(3, 11, 0, 2, 10, 1)
    assert devnodes.physical_ids(machine.root) == (0, 1, 2, 3, 10, 11)


def test_device_nodes_with_a_sick_driver_name_the_drivers_error(machine: Machine, library: Path) -> None:
    machine.dcmi(library, (), *SICK)
    machine.nodes(0)
    assert "the driver is not loaded" in texts(discover(machine))


def test_an_npu_on_the_bus_without_driver_is_told(machine: Machine) -> None:
    machine.pci("0000:c1:00.0")
    (problem,) = discover(machine).problems
    assert problem.text.startswith("present, unusable: 1 on the PCI bus (0000:c1:00.0 …)")


# -- what the user shows -----------------------------------------------------------------------------------------------


def test_devices_the_user_does_not_show_are_left_out_in_any_order_he_writes(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    assert [d.index for d in discover(machine, ASCEND_RT_VISIBLE_DEVICES="6,4").devices] == [4, 6]


@pytest.mark.parametrize("value", ["", "NoDevFiles"])
def test_a_user_who_shows_no_device_has_none(machine: Machine, library: Path, value: str) -> None:
    machine.dcmi(library, CARDS)
    found = discover(machine, ASCEND_RT_VISIBLE_DEVICES=value)
    assert (found.devices, found.problems) == ((), ())


@pytest.mark.parametrize("value", ["0-3", "0, 1", ",0", "0,1,", "a"])
def test_a_value_that_cannot_be_read_offers_no_device_and_says_so(machine: Machine, library: Path, value: str) -> None:
    machine.dcmi(library, CARDS)
    found = discover(machine, ASCEND_RT_VISIBLE_DEVICES=value)
    assert found.devices == ()
    assert "is not a list of numbers" in texts(found)


# -- identity and usage ------------------------------------------------------------------------------------------------


def test_identities_survive_renumbering(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS)
    before = {device.uid: device.card for device in discover(machine).devices}
    renumbered = [
        FakeChip(card=c.card, logical=7 - c.logical, physical=c.physical, bus=c.bus, die=c.die) for c in CARDS
    ]
    machine.dcmi(library, renumbered)
    after = {device.uid: device.card for device in discover(machine).devices}
    assert before == after


def test_without_a_die_the_place_on_this_hosts_bus_identifies(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B4_26.0.rc1.txt", MAP: "info-m_910B2.txt"})
    assert [device.uid for device in discover(machine).devices] == [
        "npu-npu-a-0000:c1:00.0-0",
        "npu-npu-a-0000:c2:00.0-0",
    ]


def test_without_a_bus_address_the_card_identifies(machine: Machine) -> None:
    machine.npu_smi({INFO: "info_910B3_container.txt", MAP: "info-m_910B3_container.txt"})
    assert [device.uid for device in discover(machine).devices] == ["npu-npu-a-card3-0", "npu-npu-a-card6-0"]


def test_parts_of_one_divided_chip_have_identities_of_their_own(machine: Machine, library: Path) -> None:
    machine.dcmi(library, [FakeChip(card=0, chip=n, logical=n, die=0xA0, used=n) for n in range(2)])
    devices = discover(machine).devices
    assert len({device.uid for device in devices}) == 2
    assert [r.used_bytes for r in discovery.usage(devices, root=machine.root, host=HOST)] == [0, MIB]


def test_without_anything_else_the_device_node_identifies(machine: Machine) -> None:
    machine.nodes(3)
    assert [device.uid for device in discover(machine).devices] == ["npu-npu-a-davinci3"]


def test_usage_is_read_per_device_in_the_order_asked(machine: Machine, library: Path) -> None:
    machine.dcmi(
        library, [FakeChip(card=n, logical=n, bus=0x10 + n, used=1000 * (n + 1), util=10 * n) for n in range(3)]
    )
    devices = discover(machine).devices
    readings = discovery.usage([devices[2], devices[0]], root=machine.root, host=HOST)
    assert [(r.uid, r.used_bytes, r.utilization) for r in readings] == [
        (devices[2].uid, 3000 * MIB, 0.2),
        (devices[0].uid, 1000 * MIB, 0),
    ]
    assert (readings[0].temperature_c, readings[0].power_w) == (37, 96.4)


def test_usage_of_a_device_that_is_gone_is_unknown(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS[:2])
    devices = discover(machine).devices
    machine.dcmi(library, CARDS[:1])
    gone = discovery.usage(devices, root=machine.root, host=HOST)[1]
    assert (gone.uid, gone.used_bytes, gone.utilization, gone.power_w) == (devices[1].uid, None, None, None)


def test_a_discovery_survives_the_way_through_json(machine: Machine, library: Path) -> None:
    machine.dcmi(library, CARDS, "topo 0 0 1 0 3")
    found = discover(machine)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Discovery) == found
