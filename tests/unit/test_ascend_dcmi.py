"""What DCMI says, through the real ctypes into a small driver library built for the purpose."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_ascend import FakeChip, build_dcmi
from hetero_llm_ascend import dcmi
from hetero_llm_ascend.chip import MIB, Chip, Reading
from hetero_llm_ascend.dcmi_library import LibraryNotFound, LibraryUnusable, PcieInfo, load

from hetero_llm.plugin import Health

Read = Callable[..., Reading]
CARDS = tuple(FakeChip(card=n, logical=n, physical=n, bus=0x10 + n, die=0xA000 + 16 * n) for n in range(8))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_dcmi(tmp_path_factory.mktemp("dcmi"))
    if built is None:
        pytest.skip("there is no C compiler to build the fake driver library with")
    return built


@pytest.fixture
def read(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    # The library reads its file once, so each test loads a copy under a name of its own.
    own = tmp_path / f"lib{tmp_path.name}.so"
    own.write_bytes(library.read_bytes())

    def read_now(*chips: FakeChip, lines: tuple[str, ...] = ()) -> Reading:
        described = tmp_path / "dcmi.txt"
        described.write_text("\n".join((*lines, *(chip.line() for chip in chips))) + "\n")
        monkeypatch.setenv("FAKE_DCMI", str(described))
        return dcmi.read(ctypes.CDLL(str(own)))

    return read_now


def places(reading: Reading) -> list[tuple[int | None, int, int | None, int | None]]:
    return [(chip.npu_id, chip.chip_id, chip.logical_id, chip.physical_id) for chip in reading.chips]


def test_eight_cards_are_eight_chips_with_all_their_facts(read: Read) -> None:
    reading = read(*CARDS)
    assert (reading.source, reading.faults, reading.failure) == ("dcmi", (), None)
    assert places(reading) == [(n, 0, n, n) for n in range(8)]
    assert reading.chips[2] == Chip(
        npu_id=2,
        logical_id=2,
        physical_id=2,
        name="910B2",
        health=Health.OK,
        memory_bytes=65536 * MIB,
        used_bytes=3000 * MIB,
        bus_id="0000:12:00.0",
        die_id="0000a020-0000a021-0000a022-0000a023-0000a024",
        utilization=0,
        temperature_c=37,
        power_w=96.4,
    )


def test_two_dies_of_an_a3_card_are_two_chips_and_the_second_has_no_power(read: Read) -> None:
    a3 = {"name": "Ascend910", "npu_name": "9391"}
    chips = [
        FakeChip(card=0, chip=0, logical=0, physical=0, bus=0x9D, **a3),
        FakeChip(card=0, chip=1, logical=1, physical=1, bus=0x9F, power=0, **a3),
        FakeChip(card=4, chip=0, logical=2, physical=8, bus=0x8D, **a3),
        FakeChip(card=4, chip=1, logical=3, physical=9, bus=0x8F, power=0, **a3),
    ]
    reading = read(*chips)
    assert places(reading) == [(0, 0, 0, 0), (0, 1, 1, 1), (4, 0, 2, 8), (4, 1, 3, 9)]
    assert [chip.power_w for chip in reading.chips] == [96.4, None, 96.4, None]
    assert {(chip.name, chip.npu_name) for chip in reading.chips} == {("Ascend910", "9391")}


def test_controllers_are_no_chips(read: Read) -> None:
    reading = read(FakeChip(card=0), FakeChip(card=0, chip=1, type=1), FakeChip(card=0, chip=2, type=2))
    assert places(reading) == [(0, 0, 0, 0)]


def test_a_chip_whose_type_cannot_be_read_is_kept(read: Read) -> None:
    reading = read(FakeChip(card=0), lines=("fail dcmi_get_device_type -1 -8255",))
    assert len(reading.chips) == 1


@pytest.mark.parametrize(
    ("code", "health"),
    [(0, "ok"), (1, "degraded"), (2, "failed"), (3, "failed"), (0xFFFFFFFF, "unknown"), (9, "unknown")],
)
def test_health_is_kept(read: Read, code: int, health: str) -> None:
    assert [chip.health for chip in read(FakeChip(card=0, health=code)).chips] == [health]


def test_a_chip_without_hbm_has_its_ordinary_memory(read: Read) -> None:
    reading = read(FakeChip(card=0, name="310P3", hbm=0, ddr=21527, available=19000))
    assert [(c.memory_bytes, c.used_bytes) for c in reading.chips] == [(21527 * MIB, 2527 * MIB)]


def test_memory_that_the_driver_does_not_know_is_unknown(read: Read) -> None:
    assert [(c.memory_bytes, c.used_bytes) for c in read(FakeChip(card=0, hbm=0)).chips] == [(None, None)]


def test_the_older_call_gives_the_name_where_the_newer_is_missing(read: Read) -> None:
    reading = read(FakeChip(card=0, npu_name="9391"), lines=("fail dcmi_get_device_chip_info_v2 -1 -8255",))
    assert [(chip.name, chip.npu_name) for chip in reading.chips] == [("910B2", "")]


def test_an_unknown_die_or_bus_is_unknown(read: Read) -> None:
    assert [(c.die_id, c.bus_id) for c in read(FakeChip(card=0, die=0, bus=0)).chips] == [(None, None)]


def test_a_bus_address_that_was_not_filled_in_is_unknown(read: Read) -> None:
    assert [chip.bus_id for chip in read(FakeChip(card=0, bus=0xFFF)).chips] == [None]


def test_a_utilization_beyond_all_is_unknown(read: Read) -> None:
    reading = read(FakeChip(card=0, util=63), FakeChip(card=1, util=255))
    assert [chip.utilization for chip in reading.chips] == [0.63, None]


OPTIONAL = (
    "dcmi_get_device_power_info",
    "dcmi_get_device_temperature",
    "dcmi_get_device_pcie_info_v2",
    "dcmi_get_device_hbm_info",
    "dcmi_get_device_die_v2",
    "dcmi_get_device_utilization_rate",
    "dcmi_get_device_phyid_from_logicid",
    "dcmi_get_topo_info_by_device_id",
)


@pytest.mark.parametrize("function", OPTIONAL)
def test_every_optional_query_fails_alone_and_silently(read: Read, function: str) -> None:
    reading = read(*CARDS[:2], lines=(f"fail {function} -1 -8255",))
    assert reading.faults == ()
    assert [(chip.logical_id, chip.health, chip.name) for chip in reading.chips] == [
        (0, "ok", "910B2"),
        (1, "ok", "910B2"),
    ]


def test_one_faulty_card_of_eight_is_one_fault_and_renumbers_nobody(read: Read) -> None:
    reading = read(*CARDS, lines=("fail dcmi_get_device_num_in_card 3 -8008",))
    assert places(reading) == [(n, 0, n, n) for n in range(8) if n != 3]
    assert len(reading.faults) == 1
    assert "NPU 3" in reading.faults[0]
    assert "-8008" in reading.faults[0]


def test_a_chip_whose_health_cannot_be_read_is_listed_as_unknown_and_told(read: Read) -> None:
    reading = read(*CARDS, lines=("fail dcmi_get_device_health 5 -8012",))
    assert [chip.health for chip in reading.chips].count(Health.UNKNOWN) == 1
    assert reading.chips[5].health is Health.UNKNOWN
    assert reading.faults == ("NPU 5 chip 0: dcmi_get_device_health: the device is not ready yet (-8012)",)


def test_a_chip_without_logical_number_keeps_no_number_and_the_others_keep_theirs(read: Read) -> None:
    reading = read(*CARDS, lines=("fail dcmi_get_device_logic_id 2 -8255",))
    assert [chip.logical_id for chip in reading.chips] == [0, 1, None, 3, 4, 5, 6, 7]
    assert reading.chips[2].physical_id is None
    assert len(reading.faults) == 1


def test_links_are_known_from_both_ends(read: Read) -> None:
    topo = ("topo 0 0 1 0 3", "topo 0 0 2 0 1", "topo 1 0 2 0 7", "topo 0 0 3 0 6", "topo 1 0 3 0 8")
    reading = read(*CARDS[:4], lines=topo)
    assert [dict(chip.links) for chip in reading.chips] == [
        {"1": "hccs", "2": "pcie", "3": "sio"},
        {"0": "hccs", "2": "hccs"},
        {"0": "pcie", "1": "hccs"},
        {"0": "sio"},
    ]


# -- the second version of the calls -----------------------------------------------------------------------------------


def test_a_950_refuses_version_1_and_is_read_with_version_2(read: Read) -> None:
    chips = [
        FakeChip(card=0, physical=4, name="Ascend950PR", npu_name="9579", hbm=131072, util=37, die=0xB0),
        FakeChip(card=1, physical=5, name="Ascend950PR", npu_name="9579", hbm=131072, health=2, bus=0),
    ]
    reading = read(*chips, lines=("init -8255", "v2init 0"))
    assert reading.failure is None
    assert places(reading) == [(0, 0, 0, 4), (1, 0, 1, 5)]
    assert [chip.health for chip in reading.chips] == ["ok", "failed"]
    assert reading.chips[0].memory_bytes == 131072 * MIB
    assert reading.chips[0].utilization == 0.37
    assert reading.chips[0].die_id == "000000b0-000000b1-000000b2-000000b3-000000b4"
    assert reading.chips[0].bus_id == "0000:C1:00.0"
    assert reading.chips[1].bus_id is None
    assert reading.chips[0].npu_name == "9579"


def test_an_older_library_has_no_version_2_and_tells_its_own_error(read: Read) -> None:
    failure = read(*CARDS, lines=("init -8005",)).failure
    assert failure is not None
    assert failure.text.startswith("dcmi_init: the driver is not loaded")
    assert "(-8005)" in failure.text
    assert any("HwHiAiUser" in step for step in failure.next)
    assert not failure.missing


def test_when_both_versions_fail_the_one_that_says_why_is_told(read: Read) -> None:
    failure = read(*CARDS, lines=("init -8255", "v2init -8020")).failure
    assert failure is not None
    assert failure.text == "dcmiv2_init: the device is taken exclusively by another container (-8020)"


def test_no_device_is_no_failure(read: Read) -> None:
    reading = read(lines=("fail dcmi_get_card_list 0 -8008",))
    assert (reading.chips, reading.failure) == ((), None)


def test_the_bus_structure_has_the_size_the_reference_states() -> None:
    assert ctypes.sizeof(PcieInfo) == 64


# -- finding the library -----------------------------------------------------------------------------------------------


def test_a_library_that_is_nowhere_is_missing(tmp_path: Path) -> None:
    with pytest.raises(LibraryNotFound):
        load((str(tmp_path),))


def test_a_missing_library_is_no_concern(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    failure = dcmi.read().failure
    assert failure is not None
    assert failure.missing


def test_a_library_that_cannot_be_loaded_is_told_in_the_loaders_words(tmp_path: Path) -> None:
    (tmp_path / "libdcmi.so").write_text("no ELF file")
    with pytest.raises(LibraryUnusable, match=r"invalid ELF header|file too short"):
        load((str(tmp_path),))
