"""The README's tables are what hardware_matrix.yaml says."""

import runpy
from pathlib import Path

import pytest

from hetero_llm.matrix import load_matrix

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(ROOT / "scripts" / "support_table.py"))


def test_the_readme_is_up_to_date(script):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script["with_tables"](text) == text, "run .venv/bin/python scripts/support_table.py"


def test_every_accelerator_has_a_place(script):
    rows = [line.split(" | ") for line in script["tables"]().splitlines() if line.startswith("| ")]
    listed = {(cells[0].removeprefix("| "), name) for cells in rows for name in cells[1].split(", ")}
    assert {(entry.kind, entry.accelerator) for entry in load_matrix().entries} <= listed


def test_only_the_part_between_the_markers_is_replaced(script):
    text = f"before\n{script['BEGIN']}\nold\n{script['END']}\nafter\n"
    replaced = script["with_tables"](text)
    assert replaced == f"before\n{script['tables']()}\nafter\n"


def test_a_page_without_markers_is_an_error(script):
    with pytest.raises(ValueError, match="hardware"):
        script["with_tables"]("no table here")
