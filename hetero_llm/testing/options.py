"""The pytest option of the kit: ``pytest -p hetero_llm.testing.options --hetero-level 2``."""

from __future__ import annotations

import pytest

from hetero_llm.testing.levels import DEFAULT_LEVEL, LEVEL_ENV, LEVELS, OPTION


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--hetero-level``."""
    parser.addoption(
        "--hetero-level",
        dest=OPTION,
        type=int,
        choices=LEVELS,
        default=None,
        help=f"highest level of backend contract tests to run; default: {LEVEL_ENV}, else {DEFAULT_LEVEL}",
    )
