"""The tables of npu-smi, read from captured and constructed samples; tests/samples/ascend says which is which."""

from __future__ import annotations

import re

import pytest
from fake_ascend import SAMPLES
from hetero_llm_ascend.chip import MIB, Chip, accelerator_name
from hetero_llm_ascend.npu_smi_table import Mapped, parse_board, parse_info, parse_map

from hetero_llm.plugin import Health


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


def info(name: str) -> tuple[Chip, ...]:
    chips, faults = parse_info(sample(name))
    assert faults == ()
    return chips


def numbers(chips: tuple[Chip, ...]) -> list[tuple[int | None, int]]:
    return [(chip.npu_id, chip.chip_id) for chip in chips]


def memory(chips: tuple[Chip, ...]) -> list[tuple[int, int]]:
    return [((chip.used_bytes or 0) // MIB, (chip.memory_bytes or 0) // MIB) for chip in chips]


# -- 910 ---------------------------------------------------------------------------------------------------------------


def test_a_910_listing_has_one_chip_per_card_and_keeps_gaps_in_the_card_numbers() -> None:
    chips = info("info_910B2_24.1.0.3.txt")
    assert numbers(chips) == [(0, 0), (1, 0), (2, 0), (5, 0)]
    assert {chip.name for chip in chips} == {"910B2"}


def test_memory_is_the_hbm_pair_also_when_it_is_glued_together() -> None:
    chips = info("info_910B2_24.1.0.3.txt")
    assert memory(chips) == [(31604, 65536), (61609, 65536), (3397, 65536), (3379, 65536)]


def test_temperature_power_utilization_and_bus_of_a_910_are_read_by_their_headers() -> None:
    chip = info("info_910B2_24.1.0.3.txt")[1]
    assert (chip.temperature_c, chip.power_w, chip.utilization, chip.bus_id) == (36, 94.8, 0.63, "0000:01:00.0")


def test_a_910_table_gives_no_logical_and_no_physical_number() -> None:
    assert {(c.logical_id, c.physical_id) for c in info("info_910B2_24.1.0.3.txt")} == {(None, None)}


def test_a_warning_is_degraded() -> None:
    assert [chip.health for chip in info("info_910B2_24.1.0.3.txt")] == ["ok", "ok", "degraded", "ok"]


def test_every_health_is_kept_and_no_card_is_dropped_for_it() -> None:
    chips = info("info_910B2_health.txt")
    assert numbers(chips) == [(number, 0) for number in range(8)]
    ok, bad, unknown = Health.OK, Health.FAILED, Health.UNKNOWN
    assert [chip.health for chip in chips] == [ok, ok, bad, ok, bad, unknown, ok, unknown]


def test_the_wide_table_of_version_26_reads_the_same() -> None:
    chips = info("info_910B4_26.0.rc1.txt")
    assert memory(chips) == [(2871, 32768), (26992, 32768)]
    assert [(chip.power_w, chip.temperature_c, chip.utilization) for chip in chips] == [(82.6, 32, 0), (84.1, 33, 0.07)]


def test_a_bus_address_that_is_not_available_is_unknown() -> None:
    chips = info("info_910B3_container.txt")
    assert [chip.bus_id for chip in chips] == [None, None]
    assert numbers(chips) == [(3, 0), (6, 0)]


# -- A3 ----------------------------------------------------------------------------------------------------------------


def test_two_dies_of_an_a3_card_share_its_number_and_have_physical_numbers() -> None:
    chips = info("info_A3_910_93_25.5.1.txt")
    assert numbers(chips) == [(0, 0), (0, 1), (4, 0), (4, 1)]
    assert [chip.physical_id for chip in chips] == [0, 1, 8, 9]
    assert memory(chips) == [(3131, 65536), (2886, 65536), (51255, 65536), (45292, 65536)]


def test_the_power_of_a_second_die_is_unknown_and_not_zero() -> None:
    assert [chip.power_w for chip in info("info_A3_910_93_25.5.1.txt")] == [170.7, None, 170.7, None]


# -- 310P --------------------------------------------------------------------------------------------------------------


def test_a_310p_has_its_memory_in_the_memory_column_and_its_logical_number_in_the_table() -> None:
    chips = info("info_310P3_24.1.0.1.txt")
    assert [chip.npu_id for chip in chips] == [0, 32, 96, 32768, 32800]
    assert [chip.logical_id for chip in chips] == [0, 1, 2, 3, 4]
    assert memory(chips) == [(19435, 21527), (1846, 21527), (1845, 21527), (1846, 21527), (1850, 21527)]
    assert {chip.power_w for chip in chips} == {None}


def test_two_chips_of_a_310p_card_are_two_chips() -> None:
    chips = info("info_310P3_duo_25.2.0.txt")
    assert numbers(chips) == [(2, 0), (2, 1), (8, 0), (8, 1)]
    assert [chip.logical_id for chip in chips] == [0, 1, 2, 3]
    assert memory(chips) == [(37623, 44278), (1412, 43693), (1530, 44278), (1413, 43693)]
    assert chips[3].health is Health.FAILED


def test_huge_pages_are_not_taken_for_memory() -> None:
    assert memory(info("info_310P3_duo_25.2.0.txt"))[0] == (37623, 44278)


# -- 950 ---------------------------------------------------------------------------------------------------------------


def test_a_950_has_its_name_in_a_cell_of_its_own_and_an_empty_chip_cell() -> None:
    chips = info("info_950_25.7.rc1.txt")
    assert numbers(chips) == [(0, 0), (1, 0), (3, 0)]
    assert {chip.name for chip in chips} == {"Ascend950PR"}
    assert [chip.health for chip in chips] == ["ok", "failed", "ok"]
    assert memory(chips) == [(90633, 131072), (30492, 131072), (5255, 131072)]


def test_the_utilization_of_a_950_has_another_header() -> None:
    chips = info("info_950_25.7.rc1.txt")
    assert [chip.utilization for chip in chips] == [0.37, 1, 0]
    assert [chip.power_w for chip in chips] == [195.6, 207.1, 191.3]
    assert [chip.bus_id for chip in chips] == ["0000:61:00.0", "0000:71:00.0", None]


# -- what is not a device ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in SAMPLES.glob("info_*.txt") if "torn" not in path.name))
def test_no_row_of_the_process_table_is_a_chip(name: str) -> None:
    lines = sample(name).splitlines()
    last = next((number for number, line in enumerate(lines) if "Process id" in line), len(lines))
    assert parse_info("\n".join(lines[:last])) == parse_info(sample(name))


def test_a_row_that_cannot_be_read_is_told_and_hides_no_other_chip() -> None:
    chips, faults = parse_info(sample("info_torn.txt"))
    assert numbers(chips) == [(0, 0), (4, 0)]
    assert memory(chips) == [(3131, 65536), (51255, 65536)]
    assert len(faults) == 2
    assert "?     Ascend910" in faults[0]


def test_a_first_row_without_its_second_does_not_swallow_the_next_chip() -> None:
    lines = sample("info_910B2_24.1.0.3.txt").splitlines()
    broken = "\n".join(line for line in lines if "0000:01:00.0" not in line)
    chips, faults = parse_info(broken)
    assert [(chip.npu_id, chip.bus_id) for chip in chips] == [
        (0, "0000:C1:00.0"),
        (2, "0000:C2:00.0"),
        (5, "0000:41:00.0"),
    ]
    assert len(faults) == 1


def test_a_second_row_with_a_blank_bus_is_no_first_row() -> None:
    text = sample("info_910B2_24.1.0.3.txt").replace("0000:01:00.0", "            ")
    chips, faults = parse_info(text)
    assert faults == ()
    assert [(chip.npu_id, chip.bus_id is None) for chip in chips] == [(0, False), (1, True), (2, False), (5, False)]


def test_a_second_row_without_a_bus_address_is_no_first_row_although_it_has_two_numbers() -> None:
    text = re.sub(r"0000:\w\w:00\.0", "NA          ", sample("info_A3_910_93_25.5.1.txt"))
    chips, faults = parse_info(text)
    assert faults == ()
    assert [(chip.npu_id, chip.chip_id, chip.physical_id, chip.bus_id) for chip in chips] == [
        (0, 0, 0, None),
        (0, 1, 1, None),
        (4, 0, 8, None),
        (4, 1, 9, None),
    ]


def test_a_bus_address_may_be_in_any_domain() -> None:
    text = sample("info_910B4_26.0.rc1.txt").replace("0000:C1:00.0", "0002:c1:00.0")
    assert [chip.bus_id for chip in parse_info(text)[0]] == ["0002:C1:00.0", "0000:C2:00.0"]


def test_a_column_of_tomorrow_does_not_change_which_pair_is_the_devices_memory() -> None:
    text = sample("info_910B2_24.1.0.3.txt")
    text = text.replace("Memory-Usage(MB)  HBM-Usage", "Memory-Usage(MB)  L2-Usage(MB) HBM-Usage")
    text = text.replace("0    / 0          3", "0    / 0   7 / 9   3").replace(
        "0    / 0          6", "0    / 0   7 / 9   6"
    )
    assert memory(parse_info(text)[0]) == memory(info("info_910B2_24.1.0.3.txt"))


def test_memory_of_zero_is_unknown() -> None:
    text = sample("info_910B4_26.0.rc1.txt").replace("26992/ 32768", "0    / 0    ")
    assert [chip.memory_bytes for chip in parse_info(text)[0]] == [32768 * MIB, None]
    assert [chip.used_bytes for chip in parse_info(text)[0]] == [2871 * MIB, None]


@pytest.mark.parametrize("text", ["", "hello\n", sample("info_none.txt"), sample("error_-8005.txt")])
def test_text_without_a_table_has_no_chip(text: str) -> None:
    assert parse_info(text) == ((), ())


# -- npu-smi info -m ---------------------------------------------------------------------------------------------------


def test_the_map_of_a_910_has_logical_numbers_without_gaps_and_no_controllers() -> None:
    mapped, faults = parse_map(sample("info-m_910B2.txt"))
    assert faults == ()
    assert {key: row.logical_id for key, row in mapped.items()} == {(0, 0): 0, (1, 0): 1, (5, 0): 2}


def test_the_map_of_an_a3_has_physical_numbers_too() -> None:
    mapped, _ = parse_map(sample("info-m_A3.txt"))
    assert mapped == {
        (0, 0): Mapped(logical_id=0, physical_id=0),
        (0, 1): Mapped(logical_id=1, physical_id=1),
        (4, 0): Mapped(logical_id=2, physical_id=8),
        (4, 1): Mapped(logical_id=3, physical_id=9),
    }


def test_the_map_of_a_950_has_no_logical_numbers_and_no_chip_column() -> None:
    mapped, faults = parse_map(sample("info-m_950.txt"))
    assert faults == ()
    assert mapped == {(card, 0): Mapped(logical_id=None, physical_id=card) for card in (0, 1, 3)}


def test_whatever_has_no_logical_number_where_there_are_some_is_no_npu() -> None:
    text = sample("info-m_910B2.txt").replace("Mcu", "Cpu")
    assert set(parse_map(text)[0]) == {(0, 0), (1, 0), (5, 0)}


def test_a_controller_is_no_npu_where_there_are_no_logical_numbers() -> None:
    text = sample("info-m_950.txt") + sample("info-m_950.txt").splitlines()[1].replace("Ascend950PR", "Mcu").replace(
        "0  ", "9  ", 1
    )
    assert set(parse_map(text)[0]) == {(0, 0), (1, 0), (3, 0)}


def test_a_row_of_the_map_that_cannot_be_read_is_told() -> None:
    mapped, faults = parse_map(sample("info-m_910B2.txt") + "\t7      broken\n")
    assert (0, 0) in mapped
    assert faults == ("npu-smi info -m has a row that cannot be read: 7  broken",)


def test_a_map_without_header_is_empty() -> None:
    assert parse_map("Error parameter\n") == ({}, ())


def test_the_second_name_is_read_from_the_board() -> None:
    assert parse_board(sample("info-t-board_A3.txt")) == "9391"
    assert parse_board("NPU ID : 0\n") == ""


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "second", "wanted"),
    [
        ("910B2", "", "910B2"),
        ("Ascend 910B2", "", "910B2"),
        ("Ascend910B4-1", "", "910B4-1"),
        ("Ascend910", "9391", "910_9391"),
        ("Ascend910_9392", "", "910_9392"),
        ("Ascend910", "", "910"),
        ("Ascend910", "NA", "910"),
        ("910B3", "9391", "910B3"),
        ("310P3", "", "310P3"),
        ("Ascend950PR", "9579", "950PR"),
        ("Ascend950DT_9582", "", "950DT"),
        ("", "", "unknown"),
        ("Ascend 31 / x", "", "31-x"),
        ("x" * 80, "", "x" * 63),
    ],
)
def test_accelerators_are_spelt_as_in_the_hardware_matrix(name: str, second: str, wanted: str) -> None:
    assert accelerator_name(name, second) == wanted
