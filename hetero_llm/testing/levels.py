"""Which contract tests run: level 0 without hardware, 1 with the vendor's fakes, 2 on the real thing."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

LEVEL_ENV = "HETERO_LLM_CONTRACT_LEVEL"
OPTION = "hetero_level"
LEVELS = (0, 1, 2)
DEFAULT_LEVEL = 1

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "hetero_level"


def at_level(level: int) -> Callable[[F], F]:
    """Put a contract test on a level; those without are on level 0."""

    def put(test: F) -> F:
        setattr(test, _ATTRIBUTE, level)
        return test

    return put


def level_of(test: object) -> int:
    """Return the level a test function is on."""
    return int(getattr(test, _ATTRIBUTE, 0))


def selected_level(config: pytest.Config) -> int:
    """Return the highest level to run: ``--hetero-level``, else `LEVEL_ENV`, else 1.

    Raises:
        pytest.UsageError: it is not 0, 1 or 2.
    """
    option = config.getoption(OPTION, None)
    chosen = option if option is not None else os.environ.get(LEVEL_ENV) or DEFAULT_LEVEL
    if str(chosen) not in {str(level) for level in LEVELS}:
        raise pytest.UsageError(f"the contract has levels 0, 1 and 2, not {chosen!r}")
    return int(chosen)
