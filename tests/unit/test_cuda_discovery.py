"""NVIDIA devices as a pretended driver lists them, through the real pynvml: see `fake_nvml`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pynvml
import pytest
from fake_nvml import (
    DRIVER_NOT_LOADED,
    GIB,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    MISMATCH,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    Gpu,
    Instance,
    Library,
    hgx,
    plugged_in,
    uuid,
)
from hetero_llm_cuda import discovery, nvml
from hetero_llm_cuda.names import accelerator_name, compute_capability
from hetero_llm_cuda.visible import ignored_words, visible_ids

from hetero_llm.plugin import Discovery, Health

SAMPLES = Path(__file__).parents[1] / "samples" / "nvidia"
EVERY_OPTIONAL_QUESTION = (
    "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor",
)


def look(library: Library, root: Path = Path("/nonexistent"), environ: Mapping[str, str] | None = None) -> Discovery:
    """Return what is discovered; NVML was shut down after it and asked nothing that changes things."""
    with plugged_in(library):
        found = discovery.discover(root, environ or {})
    assert library.sessions == 0
    assert all(re.match(r"nvml(Init|Shutdown|ErrorString|Device(Get|Is)|SystemGet)", name) for name in library.calls)
    return found


def machine(root: Path, *, nodes: int = 0, numa: Mapping[str, str] | None = None, version: str | None = None) -> Path:
    """Write as much of /dev, /sys and /proc as discovery reads."""
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{n}" for n in range(nodes))):
        if nodes:
            (root / "dev" / name).touch()
    for address, node in (numa or {}).items():
        folder = root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    if version is not None:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text((SAMPLES / version).read_text())
    return root


def names() -> Iterator[tuple[str, int | None, str]]:
    for line in (SAMPLES / "product-names.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, mib, accelerator = (part.strip() for part in line.split("|"))
            yield name, None if mib == "-" else int(mib) << 20, accelerator


# -- Whole cards -------------------------------------------------------------------------------------------------------


def test_cards_are_listed_in_the_order_of_the_bus_with_uuid_memory_and_health() -> None:
    found = look(Library(*hgx(2, used=5 * GIB)))
    assert found.problems == ()
    assert [(d.index, d.card, d.uid) for d in found.devices] == [(0, 0, uuid(0)), (1, 1, uuid(1))]
    card = found.devices[1]
    assert (card.kind, card.accelerator, card.health) == ("cuda", "H100-80GB", Health.OK)
    assert card.memory_bytes == 85_520_809_984
    assert card.free_bytes == 85_520_809_984 - 5 * GIB
    assert not card.unified_memory


def test_the_number_of_the_device_node_is_kept_apart_from_the_number_of_the_card() -> None:
    found = look(Library(Gpu(uuid=uuid(0), minor=3), Gpu(uuid=uuid(1), minor=0)))
    assert [(d.index, d.physical_index) for d in found.devices] == [(0, 3), (1, 0)]


def test_links_name_the_best_way_to_each_peer() -> None:
    nvlink, single, bridge = pynvml.NVML_P2P_STATUS_OK, pynvml.NVML_TOPOLOGY_SINGLE, pynvml.NVML_TOPOLOGY_HOSTBRIDGE
    assert nvlink == 0
    levels = {1: single, 2: single, 3: bridge, 4: pynvml.NVML_TOPOLOGY_NODE, 5: pynvml.NVML_TOPOLOGY_SYSTEM}
    first = Gpu(uuid=uuid(0), nvlinks=frozenset({1}), topology=levels)
    found = look(Library(first, *(Gpu(uuid=uuid(n)) for n in range(1, 7))))
    assert found.devices[0].links == {"1": "nvlink", "2": "pcie", "3": "pcie", "4": "node", "5": "sys"}
    assert found.devices[6].links == {}


def test_the_numa_node_is_the_kernels_and_minus_one_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, numa={"0000:07:00.0": "1", "0001:0a:1f.0": "-1"})
    found = look(Library(Gpu(uuid=uuid(0), pci=(0, 7, 0)), Gpu(uuid=uuid(1), pci=(1, 10, 31)), Gpu(uuid=uuid(2))), root)
    assert [d.numa for d in found.devices] == [1, None, None]


def test_a_numa_node_above_nine_and_a_domain_are_read_in_their_own_bases(tmp_path: Path) -> None:
    root = machine(tmp_path, numa={"0002:1a:1f.0": "12"})
    assert look(Library(Gpu(uuid=uuid(0), pci=(2, 26, 31))), root).devices[0].numa == 12


@pytest.mark.parametrize("error", [NOT_SUPPORTED, NO_PERMISSION, UNKNOWN])
@pytest.mark.parametrize("question", EVERY_OPTIONAL_QUESTION)
def test_a_question_that_fails_costs_only_its_own_answer(question: str, error: int) -> None:
    good = look(Library(*hgx(2))).devices[0]
    cards = hgx(2)
    cards[0].errors = {question: error}
    found = look(Library(*cards))
    assert [d.uid for d in found.devices] == [uuid(0), uuid(1)]
    assert found.devices[0].health in (Health.OK, Health.UNKNOWN)
    lost = {
        "nvmlDeviceGetName": {"accelerator"},
        "nvmlDeviceGetMemoryInfo": {"memory_bytes", "free_bytes", "unified_memory", "health"},
        "nvmlDeviceGetMinorNumber": {"physical_index"},
        "nvmlDeviceGetP2PStatus": {"links"},
    }.get(question, set())
    fields = ("accelerator", "index", "physical_index", "card", "memory_bytes", "free_bytes", "health", "numa", "links")
    same = [name for name in fields if name not in lost]
    assert [getattr(found.devices[0], name) for name in same] == [getattr(good, name) for name in same]


def test_a_question_the_driver_does_not_know_costs_only_its_own_answer() -> None:
    old = Library(*hgx(1), missing=tuple(name for name in EVERY_OPTIONAL_QUESTION if "MemoryInfo" not in name))
    (card,) = look(old).devices
    assert (card.uid, card.health, card.accelerator) == (uuid(0), Health.OK, "unknown")


def test_a_question_the_binding_does_not_know_costs_only_its_own_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "nvmlDeviceGetGpuFabricInfo",
        "c_nvmlGpuFabricInfo_t",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetRemappedRows",
    ):
        monkeypatch.delattr(pynvml, name)
    (card,) = look(Library(*hgx(1))).devices
    assert (card.uid, card.health, card.accelerator) == (uuid(0), Health.OK, "H100-80GB")


def test_a_board_that_refuses_the_memory_question_has_the_systems_memory_and_says_so() -> None:
    spark = Gpu(uuid=uuid(0), name="NVIDIA GB10", errors={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED})
    (card,) = look(Library(spark)).devices
    assert card.unified_memory
    assert card.memory_bytes == psutil.virtual_memory().total
    assert 0 < (card.free_bytes or 0) <= card.memory_bytes
    assert card.health is Health.OK


@pytest.mark.parametrize("error", [UNKNOWN, NO_PERMISSION])
def test_memory_that_cannot_be_read_is_unknown_and_never_invented(error: int) -> None:
    (card,) = look(Library(Gpu(uuid=uuid(0), errors={"nvmlDeviceGetMemoryInfo": error}))).devices
    assert (card.memory_bytes, card.free_bytes, card.unified_memory) == (None, None, False)
    assert card.health is Health.UNKNOWN


def test_a_memory_size_of_zero_is_not_a_size() -> None:
    (card,) = look(Library(Gpu(uuid=uuid(0), memory=0))).devices
    assert card.memory_bytes is None


# -- Faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GPU_IS_LOST, UNKNOWN, pynvml.NVML_ERROR_RESET_REQUIRED])
def test_one_card_of_eight_without_a_handle_is_a_problem_and_renumbers_nobody(error: int) -> None:
    cards = hgx(8)
    cards[3].errors = {"nvmlDeviceGetHandleByIndex_v2": error, "*": error}
    found = look(Library(*cards))
    assert [(d.index, d.uid) for d in found.devices] == [(n, uuid(n)) for n in (0, 1, 2, 4, 5, 6, 7)]
    (problem,) = found.problems
    assert (problem.kind, problem.code) == ("cuda", "HL206")
    assert problem.text == f"GPU 3 present, unusable: {pynvml.NVMLError(error)}"
    assert problem.next
    assert all("3" not in d.links for d in found.devices)


@pytest.mark.parametrize("error", [GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED])
@pytest.mark.parametrize("question", ["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetTotalEccErrors"])
def test_a_card_that_is_lost_while_it_is_asked_is_listed_as_failed(question: str, error: int) -> None:
    cards = hgx(8)
    cards[3].errors = {question: error}
    found = look(Library(*cards))
    assert [d.index for d in found.devices] == list(range(8))
    assert [d.health for d in found.devices] == [Health.FAILED if n == 3 else Health.OK for n in range(8)]
    (problem,) = found.problems
    assert uuid(3) in problem.text
    assert "unusable" in problem.text


@pytest.mark.parametrize(
    ("fault", "health", "says"),
    [
        ({"remapped": (4, 2, 0, 1)}, Health.FAILED, "could not be mapped out"),
        ({"remapped": (4, 2, 1, 0)}, Health.DEGRADED, "wait to be mapped out"),
        ({"pages_pending": 1}, Health.DEGRADED, "wait to be retired"),
        ({"uncorrected": 3}, Health.DEGRADED, "had 3 uncorrected memory errors"),
        ({"fabric_state": pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED}, Health.FAILED, "fabric manager"),
        ({"fabric_state": pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS}, Health.FAILED, "fabric manager"),
    ],
)
def test_what_the_driver_reports_decides_the_health(fault: dict[str, object], health: Health, says: str) -> None:
    cards = [*hgx(1), Gpu(uuid=uuid(1), **fault)]
    found = look(Library(*cards))
    assert [d.health for d in found.devices] == [Health.OK, health]
    (problem,) = found.problems
    assert uuid(1) in problem.text
    assert says in problem.text


@pytest.mark.parametrize(
    "harmless",
    [
        {"remapped": (4, 2, 0, 0)},
        {"uncorrected": 0},
        {"fabric_state": pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED},
    ],
)
def test_repaired_memory_and_a_card_without_a_fabric_are_healthy(harmless: dict[str, object]) -> None:
    found = look(Library(Gpu(uuid=uuid(0), **harmless)))
    assert found.devices[0].health is Health.OK
    assert found.problems == ()


# -- MIG ---------------------------------------------------------------------------------------------------------------


def divided(number: int = 0, **changes: object) -> Gpu:
    slots = (Instance(uuid="MIG-a", used=GIB), None, Instance(uuid="MIG-c", profile="3g.40gb", memory=40 * GIB))
    return Gpu(uuid=uuid(number), **{"mig": slots, "minor": 5, **changes})


def test_instances_take_the_place_of_their_card() -> None:
    found = look(Library(divided()))
    assert found.problems == ()
    assert [d.uid for d in found.devices] == ["MIG-a", "MIG-c"]
    assert [d.accelerator for d in found.devices] == ["H100-80GB-MIG-1g.10gb", "H100-80GB-MIG-3g.40gb"]
    assert [d.memory_bytes for d in found.devices] == [10 * GIB, 40 * GIB]
    assert found.devices[0].free_bytes == 9 * GIB
    assert [(d.card, d.physical_index) for d in found.devices] == [(0, 5), (0, 5)]
    assert all(d.health is Health.OK for d in found.devices)


def test_instances_get_the_numbers_no_card_has() -> None:
    found = look(Library(divided(0), *(Gpu(uuid=uuid(n)) for n in (1, 2))))
    assert [(d.index, d.uid) for d in found.devices] == [(0, "MIG-a"), (1, uuid(1)), (2, uuid(2)), (3, "MIG-c")]


def test_instances_have_no_links_and_are_nobodys_peer() -> None:
    linked = {"nvlinks": frozenset({0, 1, 2}), "topology": {}}
    found = look(Library(divided(0, **linked), Gpu(uuid=uuid(1), **linked), Gpu(uuid=uuid(2), **linked)))
    assert [d.links for d in found.devices] == [{}, {"2": "nvlink"}, {"1": "nvlink"}, {}]


def test_a_fault_of_the_card_is_one_of_all_its_instances() -> None:
    found = look(Library(divided(remapped=(0, 0, 0, 1))))
    assert [d.health for d in found.devices] == [Health.FAILED, Health.FAILED]


def test_the_profile_comes_from_the_share_where_the_name_has_none() -> None:
    nameless = {"nvmlDeviceGetName": NOT_SUPPORTED}
    slots = (
        Instance(uuid="MIG-a", slices=(1, 1), errors=nameless),
        Instance(uuid="MIG-b", slices=(3, 1), memory=40 * GIB, errors=nameless),
        Instance(uuid="MIG-c", errors={**nameless, "nvmlDeviceGetAttributes_v2": NOT_SUPPORTED}),
    )
    found = look(Library(Gpu(uuid=uuid(0), mig=slots)))
    profiles = ["1g.10gb", "1c.3g.40gb", "instance"]
    assert [d.accelerator for d in found.devices] == [f"H100-80GB-MIG-{profile}" for profile in profiles]


def test_the_memory_of_an_instance_is_never_the_systems() -> None:
    refusing = Instance(uuid="MIG-a", errors={"nvmlDeviceGetMemoryInfo": NOT_SUPPORTED})
    (device,) = look(Library(Gpu(uuid=uuid(0), mig=(refusing,)))).devices
    assert (device.memory_bytes, device.unified_memory) == (None, False)


def test_a_divided_card_without_instances_offers_nothing_and_says_so() -> None:
    found = look(Library(Gpu(uuid=uuid(0), mig=()), Gpu(uuid=uuid(1))))
    assert [(d.index, d.uid) for d in found.devices] == [(1, uuid(1))]
    (problem,) = found.problems
    assert "GPU 0 is in MIG mode" in problem.text


def test_one_instance_without_a_uuid_hides_no_other() -> None:
    slots = (Instance(uuid="MIG-a", errors={"nvmlDeviceGetUUID": UNKNOWN}), Instance(uuid="MIG-b"))
    found = look(Library(Gpu(uuid=uuid(0), mig=slots)))
    assert [d.uid for d in found.devices] == ["MIG-b"]
    assert len(found.problems) == 1


# -- No driver, or a broken one ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED])
def test_an_absent_vendor_is_absent_and_nothing_else(tmp_path: Path, error: int) -> None:
    assert look(Library(init_error=error), machine(tmp_path)) == Discovery(source="NVML")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(LIBRARY_NOT_FOUND, "libnvidia-ml.so.1 is not found"), (DRIVER_NOT_LOADED, "the kernel driver is not loaded")],
)
def test_device_nodes_without_a_working_driver_are_present_and_unusable(
    tmp_path: Path, error: int, reason: str
) -> None:
    found = look(Library(init_error=error), machine(tmp_path, nodes=2))
    assert found.devices == ()
    (problem,) = found.problems
    assert problem.code == "HL206"
    assert problem.text.startswith("2 NVIDIA GPU(s) present")
    assert f"unusable: the driver's library {reason}" in problem.text or f"unusable: {reason}" in problem.text
    assert problem.next


@pytest.mark.parametrize("error", [MISMATCH, UNKNOWN, NO_PERMISSION, pynvml.NVML_ERROR_TIMEOUT])
def test_a_driver_that_cannot_be_started_is_a_problem_even_without_device_nodes(tmp_path: Path, error: int) -> None:
    found = look(Library(init_error=error), machine(tmp_path))
    assert found.devices == ()
    (problem,) = found.problems
    assert "unusable" in problem.text
    assert problem.next


@pytest.mark.parametrize(
    ("version", "number"),
    [("proc-driver-version.txt", "535.129.03"), ("proc-driver-version-open.txt", "550.54.15")],
)
def test_a_version_mismatch_names_the_loaded_kernel_module(tmp_path: Path, version: str, number: str) -> None:
    found = look(Library(init_error=MISMATCH), machine(tmp_path, version=version))
    assert f"the kernel module is {number}" in found.problems[0].text
    assert "reboot" in found.problems[0].next[0]


def test_a_driver_that_does_not_count_is_a_problem_and_is_closed(tmp_path: Path) -> None:
    found = look(Library(count_error=UNKNOWN), machine(tmp_path))
    assert "how many GPUs" in found.problems[0].text


def test_a_card_with_a_node_that_the_driver_does_not_list_is_told(tmp_path: Path) -> None:
    cards = [Gpu(uuid=uuid(0), minor=0), Gpu(uuid=uuid(2), minor=2)]
    found = look(Library(*cards), machine(tmp_path, nodes=3))
    assert [d.index for d in found.devices] == [0, 1]
    (problem,) = found.problems
    assert problem.text.startswith("/dev/nvidia1 present, unusable")


def test_nodes_of_all_cards_and_of_the_driver_itself_are_no_problem(tmp_path: Path) -> None:
    assert look(Library(*hgx(3)), machine(tmp_path, nodes=3)).problems == ()


def test_cards_that_do_not_tell_their_node_or_are_divided_are_not_taken_for_missing(tmp_path: Path) -> None:
    silent = Gpu(uuid=uuid(0), errors={"nvmlDeviceGetMinorNumber": NOT_SUPPORTED})
    assert look(Library(silent, Gpu(uuid=uuid(1))), machine(tmp_path, nodes=2)).problems == ()


def test_nodes_are_counted_as_numbers(tmp_path: Path) -> None:
    machine(tmp_path, nodes=12)
    assert nvml.device_nodes(tmp_path) == tuple(range(12))


@pytest.mark.parametrize("nodes", [0, 1])
def test_without_the_binding_only_a_machine_with_cards_has_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    found = discovery.discover(machine(tmp_path, nodes=nodes), {})
    assert found.devices == ()
    assert [problem.next for problem in found.problems] == [("pip install nvidia-ml-py",)] * nodes


def test_the_old_package_that_hides_the_binding_is_told_and_still_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # What tells them apart is that the old one is a folder, so its module has a path.
    monkeypatch.setattr(pynvml, "__path__", [], raising=False)
    found = look(Library(*hgx(1)))
    assert len(found.devices) == 1
    (problem,) = found.problems
    assert "old package pynvml" in problem.text
    assert problem.next[0] == "pip uninstall pynvml"


def test_names_given_as_bytes_are_text() -> None:
    assert nvml.text(b"NVIDIA L4 ") == "NVIDIA L4"
    assert nvml.text(b"\xff") == "\N{REPLACEMENT CHARACTER}"
    assert nvml.text(b"") is None
    assert nvml.text(None) is None


# -- CUDA_VISIBLE_DEVICES ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("2", [2]),
        ("1,0", [0, 1]),
        (" 0 , 3 ", [0, 3]),
        ("00,+2", [0, 2]),
        ("1,1", []),
        ("0,-1,2", [0]),
        (uuid(3), [3]),
        (f"{uuid(3)[:12]},{uuid(1)}", [1, 3]),
    ],
)
def test_only_visible_devices_are_offered_under_their_own_numbers(value: str | None, indices: list[int]) -> None:
    environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert [d.index for d in look(Library(*hgx(4)), environ=environ).devices] == indices


def test_links_to_hidden_cards_are_not_shown() -> None:
    found = look(Library(*hgx(4)), environ={"CUDA_VISIBLE_DEVICES": "0,2"})
    assert [d.links for d in found.devices] == [{"2": "nvlink"}, {"0": "nvlink"}]


@pytest.mark.parametrize(
    ("value", "ignored"),
    [("0,9", "9"), ("0,x,1", "x, 1"), ("1,1", "1, 1"), ("0,-1,2", "-1, 2"), ("GPU-ffff", "GPU-ffff")],
)
def test_words_that_name_nothing_are_told(value: str, ignored: str) -> None:
    (problem,) = look(Library(*hgx(2)), environ={"CUDA_VISIBLE_DEVICES": value}).problems
    assert f"names {ignored}, which" in problem.text


@pytest.mark.parametrize("value", ["", "-1", "NoDevFiles", "0,1"])
def test_hiding_devices_on_purpose_is_no_problem(value: str) -> None:
    assert look(Library(*hgx(2)), environ={"CUDA_VISIBLE_DEVICES": value}).problems == ()


@pytest.mark.parametrize(
    ("value", "uids"),
    [
        ("MIG-c", ["MIG-c"]),
        ("0", ["MIG-a"]),
        ("1", [uuid(1)]),
        ("0,1", ["MIG-a", uuid(1)]),
        ("MIG-c,MIG-a", ["MIG-a", "MIG-c"]),
    ],
)
def test_the_number_of_a_divided_card_means_its_first_instance(value: str, uids: list[str]) -> None:
    found = look(Library(divided(0), Gpu(uuid=uuid(1))), environ={"CUDA_VISIBLE_DEVICES": value})
    assert sorted(d.uid for d in found.devices) == sorted(uids)
    assert found.problems == ()


def test_ids_keep_the_order_they_are_written_in() -> None:
    assert visible_ids("3,0,2") == ("3", "0", "2")
    assert visible_ids("MIG-b,MIG-a,GPU-c") == ("MIG-b", "MIG-a")
    assert visible_ids(None) is None
    assert ignored_words("MIG-b,0") == ("0",)


# -- Names and chips ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "memory_bytes", "accelerator"), list(names()))
def test_product_names_become_accelerators(name: str, memory_bytes: int | None, accelerator: str) -> None:
    assert accelerator_name(name, memory_bytes) == accelerator


@pytest.mark.parametrize("name", ["NVIDIA A1000", "NVIDIA H100X", "NVIDIA A100X"])
def test_a_product_whose_name_only_begins_like_another_is_not_that_one(name: str) -> None:
    assert accelerator_name(name, 80 * GIB) == name.removeprefix("NVIDIA ")


@pytest.mark.parametrize("name", ["", "  ", "???", "NVIDIA " + "X" * 200, "NVIDIA " + "a-" * 100])
def test_any_name_is_fit_to_be_a_resource_and_a_label(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", accelerator_name(name))


@pytest.mark.parametrize(
    ("accelerator", "capability"),
    [
        ("B200", (10, 0)), ("B300", (10, 3)), ("GB10", (12, 1)), ("RTX-5090", (12, 0)),
        ("RTX-PRO-6000-Blackwell-Server-Edition", (12, 0)), ("H100-80GB", (9, 0)), ("H100-80GB-MIG-1g.10gb", (9, 0)),
        ("H200", (9, 0)), ("H20", (9, 0)), ("GH200-96GB", (9, 0)), ("L4", (8, 9)), ("L20", (8, 9)), ("L40S", (8, 9)),
        ("RTX-4090", (8, 9)), ("RTX-6000-Ada-Generation", (8, 9)), ("RTX-4000-SFF-Ada-Generation", (8, 9)),
        ("A100-40GB", (8, 0)), ("A30", (8, 0)), ("A10", (8, 6)), ("A10G", (8, 6)), ("A40", (8, 6)),
        ("RTX-3090", (8, 6)), ("RTX-A6000", (8, 6)), ("T4", (7, 5)), ("RTX-2080-Ti", (7, 5)),
        ("Quadro-RTX-8000", (7, 5)), ("V100-32GB", (7, 0)), ("P40", (6, 1)), ("P100-PCIE-16GB", (6, 0)),
        ("unknown", None), ("L400", None), ("A1000X", None),
    ],
)  # fmt: skip
def test_chips_have_the_compute_capability_of_nvidias_list(
    accelerator: str, capability: tuple[int, int] | None
) -> None:
    assert compute_capability(accelerator) == capability


# -- Readings and versions ---------------------------------------------------------------------------------------------


def test_usage_is_read_by_uuid_in_the_order_asked() -> None:
    cards = [Gpu(uuid=uuid(n), used=n * GIB, utilization=50 * n, temperature=30 + n, milliwatts=1500) for n in range(3)]
    with plugged_in(Library(*cards)) as library:
        devices = discovery.discover(Path("/nonexistent"), {}).devices
        readings = discovery.usage((devices[2], devices[1]))
    assert library.sessions == 0
    assert [reading.uid for reading in readings] == [uuid(2), uuid(1)]
    assert [reading.used_bytes for reading in readings] == [2 * GIB, GIB]
    assert [reading.utilization for reading in readings] == [1.0, 0.5]
    assert [reading.temperature_c for reading in readings] == [32.0, 31.0]
    assert [reading.power_w for reading in readings] == [1.5, 1.5]


def test_what_a_device_does_not_measure_is_none_and_not_zero() -> None:
    with plugged_in(Library(divided())):
        (device, _) = discovery.discover(Path("/nonexistent"), {}).devices
        (reading,) = discovery.usage((device,))
    assert reading.used_bytes == GIB
    assert (reading.utilization, reading.temperature_c, reading.power_w) == (None, None, None)


def test_a_device_that_is_gone_has_nothing_measured() -> None:
    devices = look(Library(*hgx(2))).devices
    with plugged_in(Library(*hgx(1))):
        readings = discovery.usage(devices)
    assert [reading.used_bytes for reading in readings] == [0, None]


def test_without_a_driver_nothing_is_measured() -> None:
    devices = look(Library(*hgx(1))).devices
    with plugged_in(Library(init_error=LIBRARY_NOT_FOUND)):
        (reading,) = discovery.usage(devices)
    assert (reading.uid, reading.used_bytes) == (uuid(0), None)


def test_versions_are_the_drivers() -> None:
    with plugged_in(Library(driver="570.86.15", cuda=12080)) as library:
        assert discovery.driver_versions() == ("570.86.15", "12.8")
    assert library.sessions == 0


def test_without_the_library_the_kernel_module_tells_its_version(tmp_path: Path) -> None:
    with plugged_in(Library(init_error=MISMATCH)):
        assert discovery.driver_versions(machine(tmp_path, version="proc-driver-version.txt")) == ("535.129.03", None)
