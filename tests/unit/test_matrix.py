from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from hetero_llm_ascend.chip import accelerator_name as ascend_name
from hetero_llm_cuda.names import accelerator_name as cuda_name

from hetero_llm.errors import MatrixInvalid
from hetero_llm.matrix import Level, load_matrix, parse_matrix

ROOT = Path(__file__).parents[2]
EVIDENCE = "evidence: [{source: a document, date: 2026-12-01, level: documented}]"
ROW = "kind: toy, accelerator: T1, vendor: Toys, collective: gloo, dtypes: [float32], features: [eager]"


def one(row: str) -> str:
    return f"schema: 1\naccelerators:\n  - {{{row}}}\n"


def test_the_installed_matrix_is_in_the_documented_shape() -> None:
    assert load_matrix().entries


def test_an_entry_is_found_by_its_name_and_by_what_vendor_tools_call_it() -> None:
    matrix = load_matrix()
    entry = matrix.find("cuda", "H100-80GB")
    assert entry is not None
    assert entry.native_resource == "GPU"
    assert matrix.find("cuda", "nvidia h100 80gb hbm3") is entry


def test_the_same_name_of_another_kind_is_not_found() -> None:
    assert load_matrix().find("ascend", "H100-80GB") is None


def test_an_unknown_accelerator_is_none_and_no_error() -> None:
    assert load_matrix().find("cuda", "H900") is None


def test_310p_lists_half_precision_only_and_no_pipeline() -> None:
    entry = load_matrix().find("ascend", "310P3")
    assert entry is not None
    assert entry.dtypes == ("float16",)
    assert "pp" not in entry.features


def test_every_verified_claim_names_a_test_that_exists() -> None:
    rows = load_matrix().entries
    evidence = [e for row in rows for e in (*row.evidence, *(e for v in row.versions for e in v.evidence))]
    for claim in (e for e in evidence if e.level is Level.VERIFIED):
        file, _, test = claim.source.partition("::")
        assert f"def {test}(" in (ROOT / file).read_text()


NVIDIA = ("A10", "A100-40GB", "A100-80GB", "L4", "L20", "L40S", "H20", "H100-80GB", "H100-PCIe", "H200", "RTX-4090")
ASCEND = ("910B1", "910B2", "910B3", "910B4", "910B4-1", "910_9391", "910_9392", "310P3", "950PR", "950DT")
GIB = 1 << 30


@pytest.mark.parametrize(("kind", "accelerators"), [("cuda", NVIDIA), ("ascend", ASCEND)])
def test_the_accelerators_the_product_is_named_for_are_listed(kind: str, accelerators: tuple[str, ...]) -> None:
    assert [name for name in accelerators if load_matrix().find(kind, name) is None] == []


def test_no_claim_is_from_the_future() -> None:
    rows = load_matrix().entries
    days = [e.date for row in rows for e in (*row.evidence, *(e for v in row.versions for e in v.evidence))]
    assert max(days) <= datetime.date.today() + datetime.timedelta(days=1)


def test_every_name_a_vendors_tool_prints_leads_to_its_row_by_the_backends_own_rule() -> None:
    named = [(entry, name) for entry in load_matrix().entries for name in entry.names]
    rules = {
        "cuda": lambda entry, name: cuda_name(name, entry.memory_bytes),
        "ascend": lambda _, name: ascend_name(name),
    }
    wrong = [
        (name, rules[entry.kind](entry, name))
        for entry, name in named
        if entry.kind in rules and rules[entry.kind](entry, name) != entry.accelerator
    ]
    assert wrong == []
    assert {"cuda", "ascend"} <= {entry.kind for entry, _ in named}


@pytest.mark.parametrize(
    ("kind", "resource", "variable", "collective"),
    [("cuda", "GPU", "CUDA_VISIBLE_DEVICES", "nccl"), ("ascend", "NPU", "ASCEND_RT_VISIBLE_DEVICES", "hccl")],
)
def test_the_rows_of_a_kind_agree_with_its_backend(kind: str, resource: str, variable: str, collective: str) -> None:
    rows = [row for row in load_matrix().entries if row.kind == kind]
    assert {(row.native_resource, row.visible_devices_env, row.collective) for row in rows} == {
        (resource, variable, collective)
    }


def test_the_two_dies_of_an_a3_card_go_together_and_no_others_do() -> None:
    paired = {row.accelerator for row in load_matrix().entries if row.pairing == "card"}
    assert paired == {f"910_{die}" for die in ("9362", "9372", "9381", "9382", "9391", "9392")}


def test_a_910b4_and_a_910b4_1_differ_in_memory() -> None:
    small, large = (load_matrix().find("ascend", name) for name in ("910B4", "910B4-1"))
    assert small is not None
    assert large is not None
    assert (small.memory_bytes, large.memory_bytes) == (32 * GIB, 64 * GIB)


def test_x6_every_set_of_the_ascend_plugin_has_vllm_of_the_same_release() -> None:
    sets = [known for row in load_matrix().entries if row.kind == "ascend" for known in row.versions]
    assert sets
    assert all(known.plugin == known.vllm for known in sets)


def test_figures_are_of_a_possible_size() -> None:
    for row in load_matrix().entries:
        assert row.memory_bytes is None or 8 * GIB <= row.memory_bytes <= 1024 * GIB
        assert row.memory_bandwidth_bytes_per_s is None or 10**11 <= row.memory_bandwidth_bytes_per_s <= 10**13
        assert row.bf16_flops is None or 10**13 <= row.bf16_flops <= 10**16
        assert row.fp8_flops is None or row.bf16_flops is None or row.bf16_flops <= row.fp8_flops


def test_a_minimal_row_with_evidence_is_accepted() -> None:
    assert parse_matrix(one(f"{ROW}, {EVIDENCE}")).find("toy", "t1") is not None


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (ROW, "missing required field `evidence`"),
        (f"{ROW}, evidence: []", "length >= 1"),
        (f"{ROW}, evidence: [{{source: x, date: 2026-12-01, level: guessed}}]", "guessed"),
        (f"{ROW}, evidence: [{{source: x, level: reported}}]", "missing required field `date`"),
        (f"{ROW}, evidence: [{{source: '', date: 2026-12-01, level: reported}}]", "length >= 1"),
        (f"{ROW}, {EVIDENCE}, versions: [{{torch: '2'}}]", "missing required field `evidence`"),
        (f"{ROW}, {EVIDENCE}, memory_byte: 1", "memory_byte"),
        (f"{ROW}, {EVIDENCE}, memory_bytes: 0", ">= 1"),
        (f"{ROW}, {EVIDENCE}, memory_bytes: 80GiB", "Expected `int | null`, got `str`"),
        (f"{ROW}, {EVIDENCE}".replace("T1", "T 1"), "regex"),
    ],
)
def test_a_row_that_is_not_in_the_documented_shape_is_refused(row: str, complaint: str) -> None:
    with pytest.raises(MatrixInvalid) as caught:
        parse_matrix(one(row))
    assert complaint in (caught.value.report.cause or "")


def test_the_same_accelerator_twice_is_refused() -> None:
    row = f"{{{ROW}, {EVIDENCE}}}"
    with pytest.raises(MatrixInvalid, match="twice"):
        parse_matrix(f"schema: 1\naccelerators: [{row}, {row}]")


def test_text_that_is_not_yaml_is_refused() -> None:
    with pytest.raises(MatrixInvalid, match="not YAML"):
        parse_matrix("a: [")


def test_another_schema_is_refused_with_both_numbers() -> None:
    with pytest.raises(MatrixInvalid, match="schema 7, this hetero-llm reads 1"):
        parse_matrix("schema: 7\naccelerators: []")
