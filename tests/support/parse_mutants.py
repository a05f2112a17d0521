"""Ways to break one parsing rule of a backend, each with the test file that must notice.

`only` is a pytest ``-k`` expression: the file is not run whole, to save time.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLES = "test_ascend_npu_smi_tables.py"
DCMI = "test_ascend_dcmi.py"
ASCEND = "test_ascend_discovery.py"
ASCEND_ENGINE = "test_ascend_engine.py"
CUDA = "test_cuda_discovery.py"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule, broken.

    Attributes:
        rule: what does not hold any more; the name of the case.
        file: file of the package, ``hetero_llm_ascend/dcmi.py``.
        old: text that stands in the file exactly once.
        new: what stands there instead.
        tests: file in tests/unit that has to fail.
        only: which of its tests are run.
    """

    rule: str
    file: str
    old: str
    new: str
    tests: str
    only: str


def _mutants(file: str, *rows: tuple[str, str, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(rule, file, old, new, tests, only) for rule, old, new, tests, only in rows)


MUTANTS = (
    *_mutants(
        "hetero_llm_ascend/npu_smi_table.py",
        ("the-longer-column-name-first", r"NPU Util\(%\)|NPU|", r"NPU|NPU Util\(%\)|", TABLES, "utilization_of_a_950"),
        ("an-alarm-is-a-failure", '"alarm": Health.FAILED, ', "", TABLES, "every_health"),
        ("a-lone-row-takes-no-other", "rows[1:] if alone else rows[2:]", "rows[2:]", TABLES, "does_not_swallow"),
        ("a-bus-of-na-is-no-first-row", 'health != "NA" and ', "", TABLES, "second_row_without_a_bus"),
        ("the-last-column-takes-the-rest", "max(0, len(names) - 1)", "-1", TABLES, "memory_is_the_hbm_pair"),
        ("the-last-pair-is-the-memory", "int(pairs[-1][2])", "int(pairs[0][2])", TABLES, "column_of_tomorrow"),
        (
            "no-memory-is-unknown",
            "total * MIB if total else None,\n        used",
            "total * MIB,\n        used",
            TABLES,
            "zero",
        ),
        ("chips-of-a-card-are-told-apart", 'second.get("Chip", "0")', '"0"', TABLES, "two_dies or two_chips"),
        ("a-chip-has-its-physical-number", '"Phy-ID", ""', '"Phy", ""', TABLES, "two_dies"),
        ("map-columns-stand-two-blanks-apart", r"\s{2,}", r"\s+", TABLES, "map_of_a_910 or map_of_an_a3"),
        ("a-controller-has-no-logical-number", 'row.get("Chip Logic ID") != "-"', "True", TABLES, "whatever_has_no"),
        ("the-process-table-is-none-of-devices", "            return\n", "            pass\n", TABLES, "process_table"),
    ),
    *_mutants(
        "hetero_llm_ascend/npu_smi.py",
        ("no-card-is-no-failure", "_NONE.lower() in text.lower()", "_NONE in text.lower()", ASCEND, "there_is_no_card"),
        (
            "the-map-decides",
            "if any(row.logical_id is not None",
            "if any(row.logical_id is None",
            ASCEND,
            "come_from_the_map",
        ),
        (
            "a-chip-outside-the-map-has-no-number",
            "logical_id=None if row is None",
            "logical_id=chip.logical_id if row is None",
            ASCEND,
            "map_counts_more",
        ),
        (
            "without-a-map-the-table-counts",
            "if any(chip.logical_id is not None",
            "if any(chip.logical_id is None",
            ASCEND,
            "own_table",
        ),
    ),
    *_mutants(
        "hetero_llm_ascend/dcmi.py",
        ("an-emergency-is-a-failure", "3: Health.FAILED}", "3: Health.DEGRADED}", DCMI, "health_is_kept"),
        ("no-power-is-unknown", "power / 10 if power else", "power / 10 if power is not None else", DCMI, "two_dies"),
        ("controllers-are-no-chips", "return kind.value == _NPU", "return True", DCMI, "controllers"),
        ("a-faulty-card-hides-no-other", "            continue\n", "            break\n", DCMI, "one_faulty_card"),
        (
            "used-is-what-is-not-available",
            "(ordinary.memory_size - ordinary.memory_available)",
            "ordinary.memory_available",
            DCMI,
            "without_hbm",
        ),
        (
            "more-than-all-is-unknown",
            "percent.value / 100 if percent.value <= 100 else None",
            "percent.value / 100",
            DCMI,
            "beyond_all",
        ),
    ),
    *_mutants(
        "hetero_llm_ascend/devnodes.py",
        ("nodes-have-more-than-one-digit", r"davinci(\d+)", r"davinci(\d)", ASCEND, "counted_by_number"),
        (
            "nodes-ascend-by-number",
            "sorted(int(match[1]) for match in names if match)",
            "(int(name) for name in sorted(match[1] for match in names if match))",
            ASCEND,
            "counted_by_number",
        ),
        ("a-display-chip-is-no-npu", '"0x12"', '"0x"', ASCEND, "display_chip"),
    ),
    *_mutants(
        "hetero_llm_ascend/visible.py",
        (
            "numbers-ascend",
            "sorted({device.index for device in devices})",
            "[device.index for device in devices]",
            ASCEND_ENGINE,
            "whatever_order",
        ),
        ("a-number-stands-once", "later <= earlier", "later < earlier", ASCEND_ENGINE, "fewer_devices"),
        ("no-blanks", r"\d+(,\d+)*", r"\d+(,\s*\d+)*", ASCEND_ENGINE, "fewer_devices"),
    ),
    *_mutants(
        "hetero_llm_cuda/names.py",
        ("a-name-that-begins-alike-is-another", "GH200)(?![0-9A-Za-z])", "GH200)", CUDA, "only_begins_like"),
        ("a-narrower-board-is-another", '"H100": ("PCIe", "NVL")', '"H100": ("NVL",)', CUDA, "product_names"),
        ("the-size-of-the-host-is-not-the-cards", " and chip not in _SIZE_OF_HOST", "", CUDA, "product_names"),
        ("all-slices-are-no-part", "< slices else", "<= slices else", CUDA, "profile_comes_from"),
    ),
    *_mutants(
        "hetero_llm_cuda/visible.py",
        ("a-repeated-id-hides-all", "            return ()\n", "            continue\n", CUDA, "only_visible"),
        (
            "reading-stops-at-the-first-other-word",
            "            break\n",
            "            continue\n",
            CUDA,
            "only_visible",
        ),
        ("a-uuid-may-be-shortened", "uid.startswith(word)", "uid == word", CUDA, "only_visible"),
    ),
    *_mutants(
        "hetero_llm_cuda/reading.py",
        ("a-size-of-zero-is-none", "found.total > 0", "found.total >= 0", CUDA, "size_of_zero"),
        (
            "a-failed-question-is-no-refusal",
            ' and not device.supports("nvmlDeviceGetMemoryInfo")',
            "",
            CUDA,
            "never_invented",
        ),
        (
            "an-instance-never-has-the-systems-memory",
            "found is None and not is_instance",
            "found is None",
            CUDA,
            "never_the_systems",
        ),
        (
            "failed-rows-come-after-pending-ones",
            "_, _, rows_pending, rows_failed",
            "_, _, rows_failed, rows_pending",
            CUDA,
            "decides_the_health",
        ),
        ("no-numa-node-is-minus-one", "node if node >= 0 else None", "node", CUDA, "minus_one"),
        ("the-bus-is-hexadecimal", "{pci.bus:02x}", "{pci.bus:02d}", CUDA, "own_bases"),
    ),
    *_mutants(
        "hetero_llm_cuda/nvml.py",
        ("a-lost-card-has-failed", "error.value in self._fatal() or ", "", CUDA, "lost_while"),
        (
            "the-open-kernel-module-has-words-between",
            r"Kernel Module\b.*?\s",
            r"Kernel Module\s+",
            CUDA,
            "version_mismatch",
        ),
        ("cuda-counts-in-thousands-and-tens", "number % 1000 // 10", "number % 1000", CUDA, "versions_are"),
        (
            "nodes-are-counted-as-numbers",
            "sorted(int(name) for name in names if name.isdigit())",
            "int(name) for name in sorted(names) if name.isdigit()",
            CUDA,
            "counted_as_numbers",
        ),
    ),
)
