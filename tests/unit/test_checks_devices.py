"""What the doctor says of discovered devices: nodes and the hardware matrix are the inputs."""

import pytest

from hetero_llm.cli.checks_devices import (
    check_discovery,
    check_matrix,
    check_versions,
    check_visible_devices,
    device_checks,
    visible_devices_faults,
)
from hetero_llm.matrix import load_matrix, parse_matrix
from hetero_llm.model import Device, Health, NodeInventory, Problem

GIB = 1 << 30
EVIDENCE = "evidence: [{source: a document, date: 2026-12-01, level: documented}]"
MATRIX = parse_matrix(f"""
schema: 1
accelerators:
  - {{kind: toy, accelerator: T1, vendor: Toys, collective: gloo, dtypes: [float32], features: [eager], {EVIDENCE},
     memory_bytes: {64 * GIB},
     versions: [
       {{vllm: 0.23.0, plugin: 0.23.0, torch: 2.10.0, toolkit: 9.1.0, {EVIDENCE}}},
       {{vllm: 0.18.0, plugin: 0.18.0, torch: 2.9.0+toy, {EVIDENCE}}}]}}
  - {{kind: toy, accelerator: T2, vendor: Toys, collective: gloo, dtypes: [float32], features: [eager], {EVIDENCE}}}
""")
GOOD = {"vllm": "0.23.0", "plugin": "0.23.0", "torch": "2.10.0", "toolkit": "9.1.0", "driver": "25.5"}


def node(*health, accelerator="T1", memory_gib=64, problems=(), versions=None, simulated=False):
    devices = tuple(
        Device(
            kind="toy",
            accelerator=accelerator,
            uid=f"toy-{index}",
            index=index,
            memory_bytes=memory_gib * GIB,
            health=state,
            simulated=simulated,
        )
        for index, state in enumerate(health)
    )
    return NodeInventory(
        node="here",
        host="here",
        address="10.0.0.1",
        kind="toy",
        devices=devices,
        problems=tuple(Problem(kind="toy", code="HL203", text=text, next=("mend it",)) for text in problems),
        versions=versions or {},
    )


def test_healthy_devices_are_counted():
    check = check_discovery(node(Health.OK, Health.OK))
    assert (check.name, check.ok, check.text) == ("toy.discovery", True, "2 x T1 ok")


def test_d7_hardware_whose_library_fails_is_present_and_unusable_with_the_reason():
    check = check_discovery(node(problems=("libtoy.so cannot be loaded",)))
    assert check.ok is False
    assert check.text == "present, unusable: libtoy.so cannot be loaded"
    assert check.next == ("mend it",)


def test_d9_a_vendor_nobody_asked_for_that_is_absent_is_not_mentioned():
    assert device_checks((), (), MATRIX) == ()


def test_a_kind_asked_for_by_name_that_is_absent_is_said_to_be_so_and_is_no_failure():
    (check,) = device_checks((), ("toy",), MATRIX)
    assert (check.name, check.ok, check.text) == ("toy.discovery", None, "no such device here")


def test_other_kinds_than_those_asked_for_are_left_out():
    assert [check.name for check in device_checks((node(Health.OK),), ("other",), MATRIX)] == ["other.discovery"]


def test_a_failed_device_fails_beside_the_good_ones():
    check = check_discovery(node(Health.OK, Health.FAILED))
    assert check.ok is False
    assert check.text == "1 x T1 failed, 1 x T1 ok"
    assert check.next


def test_a_problem_beside_good_devices_fails_with_its_advice():
    check = check_discovery(node(Health.OK, problems=("card 5 does not answer",)))
    assert (check.ok, check.next) == (False, ("mend it",))
    assert check.text == "1 x T1 ok; card 5 does not answer"


@pytest.mark.parametrize("health", [Health.DEGRADED, Health.UNKNOWN])
def test_a_device_that_is_not_quite_well_is_a_note(health):
    assert check_discovery(node(Health.OK, health)).ok is None


def test_pretended_devices_are_marked():
    assert check_discovery(node(Health.OK, simulated=True)).text == "1 x T1 ok (simulated)"


def test_an_accelerator_of_the_matrix_is_known():
    (check,) = check_matrix(node(Health.OK), MATRIX)
    assert (check.ok, check.next) == (True, ())


def test_an_accelerator_that_is_not_listed_is_a_note_and_never_a_failure():
    (check,) = check_matrix(node(Health.OK, accelerator="T900"), MATRIX)
    assert check.ok is None
    assert "T900 is not listed" in check.text


@pytest.mark.parametrize(("memory_gib", "ok"), [(63, True), (55, True), (54, None), (32, None), (80, None)])
def test_memory_that_is_not_what_the_matrix_says_is_a_note(memory_gib, ok):
    (check,) = check_matrix(node(Health.OK, memory_gib=memory_gib), MATRIX)
    assert check.ok is ok
    if ok is None:
        assert f"{memory_gib}.0 GiB" in check.text
        assert "64.0 GiB" in check.text


def test_an_accelerator_without_a_listed_memory_has_nothing_to_compare():
    assert check_matrix(node(Health.OK, accelerator="T2", memory_gib=1), MATRIX)[0].ok is True


def test_versions_of_a_known_set_are_told_with_how_that_is_known():
    (check,) = check_versions(node(Health.OK, versions=GOOD), MATRIX)
    assert check.ok is True
    assert check.text.endswith("known to fit (documented)")


@pytest.mark.parametrize("change", [{"torch": "2.10.0+cu13"}, {"plugin": "0.23.0.post1"}, {"toolkit": None}])
def test_local_parts_post_releases_and_unknown_versions_do_not_make_a_set_another(change):
    assert check_versions(node(Health.OK, versions=GOOD | change), MATRIX)[0].ok is True


def test_a_local_part_counts_where_the_matrix_names_one():
    versions = {"vllm": "0.18.0", "plugin": "0.18.0", "torch": "2.9.0"}
    assert check_versions(node(Health.OK, versions=versions), MATRIX)[0].ok is None


def test_versions_of_no_set_are_a_note_that_names_the_nearest_and_the_difference():
    (check,) = check_versions(node(Health.OK, versions=GOOD | {"torch": "2.11.0"}), MATRIX)
    assert check.ok is None
    assert "nearest: vllm 0.23.0" in check.text
    assert check.next == ("torch 2.10.0 instead of 2.11.0",)


def test_a_machine_without_vllm_is_told_what_would_fit():
    (check,) = check_versions(node(Health.OK, versions={"torch": "2.10.0"}), MATRIX)
    assert check.ok is None
    assert "vllm 0.23.0" in check.text


def test_a_kind_without_known_sets_has_no_version_check():
    assert check_versions(node(Health.OK, accelerator="T2", versions=GOOD), MATRIX) == ()


def test_the_installed_matrix_can_be_compared_with():
    assert device_checks((node(Health.OK),), (), load_matrix())[1].ok is None


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ("", ()),
        ("0", ()),
        ("0,1,7", ()),
        ("6,4", ("is not ascending",)),
        ("1,1", ("names 1 twice",)),
        ("0, 1", ("has blanks",)),
        ("0-3", ("has a range",)),
        (",0", ("has an empty entry",)),
        ("0,1,", ("has an empty entry",)),
        ("NoDevFiles", ("has something that is no number",)),
    ],
)
def test_the_ascend_variable_takes_ascending_numbers_only(value, faults):
    assert visible_devices_faults("ASCEND_RT_VISIBLE_DEVICES", value) == faults


@pytest.mark.parametrize(
    ("value", "faults"),
    [
        ("1,0", ()),
        ("GPU-8a0f,GPU-1b2c", ()),
        ("MIG-41b35014", ()),
        ("1,1", ("names 1 twice",)),
        ("0-3", ("has a range",)),
    ],
)
def test_the_cuda_variable_keeps_the_users_order_and_takes_ids(value, faults):
    assert visible_devices_faults("CUDA_VISIBLE_DEVICES", value) == faults


def test_a_variable_that_cannot_be_read_fails_with_its_value_and_its_fault():
    check = check_visible_devices({"ASCEND_RT_VISIBLE_DEVICES": "6,4"}, ["ASCEND_RT_VISIBLE_DEVICES"])
    assert check.ok is False
    assert "'6,4' is not ascending" in check.text


def test_a_variable_that_hides_everything_is_a_note():
    check = check_visible_devices({"CUDA_VISIBLE_DEVICES": ""}, ["CUDA_VISIBLE_DEVICES"])
    assert (check.ok, check.next) == (None, ("unset CUDA_VISIBLE_DEVICES",))


def test_variables_of_backends_that_are_not_loaded_are_none_of_our_business():
    assert check_visible_devices({"ACME_VISIBLE": "0-3"}, ["CUDA_VISIBLE_DEVICES"]).ok is True
