"""docs/reference/cli.md is what the commands say of themselves."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_reference_page_is_up_to_date():
    module = runpy.run_path(str(ROOT / "scripts" / "cli_reference.py"))
    assert module["PAGE"].read_text() == module["page"](), "run .venv/bin/python scripts/cli_reference.py"
