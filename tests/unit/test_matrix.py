from __future__ import annotations

from pathlib import Path

import pytest

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
