"""Every known field failure has tests that show it cannot happen here, and tests/cases.toml names them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHOWN = {
    "D": (2, 4, 6, 7, 8, 9, 10, 11, 13),
    "V": (1, 2, 5, 7, 9, 10),
    "P": (1, 5, 6, 7, 8, 9, 11, 12, 14, 15, 16),
    "C": (1, 2, 4, 6, 7),
    "F": (1, 2, 3, 5, 8, 11, 13, 16, 17),
    "S": (1, 2, 4),
    "A": (2, 4, 5, 6),
    "X": (2, 4, 6),
}
PARTLY = {"F": (6, 14, 15), "R": (4, 5, 8, 16, 18)}
LATER = {"F": (7,), "R": (1, 2, 6, 9, 10, 11, 15, 17, 19), "X": (5,)}
FILE = tomllib.loads((ROOT / "tests" / "cases.toml").read_text(encoding="utf-8"))
CASES: dict[str, list[str]] = FILE["cases"]
MISSING: dict[str, str] = FILE["later"]


def ids(table: Mapping[str, tuple[int, ...]]) -> set[str]:
    return {f"{letter}{number}" for letter, numbers in table.items() for number in numbers}


KNOWN = ids(SHOWN) | ids(PARTLY) | ids(LATER)


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the test functions in a file, read and not imported."""
    file = ROOT / path
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if file.is_file() else ()
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(function.name for function in functions if function.name.startswith("test_"))


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_tests_of_a_case_exist(case: str) -> None:
    assert CASES[case]
    missing = [test for test in CASES[case] if test.partition("::")[2] not in names_in(test.partition("::")[0])]
    assert missing == []


@pytest.mark.parametrize("case", sorted(CASES))
def test_no_test_is_named_twice_for_a_case(case: str) -> None:
    assert len(set(CASES[case])) == len(CASES[case])


def test_every_case_names_its_tests_or_what_is_missing() -> None:
    assert set(CASES) == ids(SHOWN) | ids(PARTLY)
    assert set(MISSING) == ids(PARTLY) | ids(LATER)
    assert all(reason.strip() for reason in MISSING.values())


def test_a_test_named_for_a_case_is_listed_under_it() -> None:
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_*.py")]
    named = {(case, f"{file}::{name}") for file in files for name in names_in(file) for case in cases_of(name)}
    assert sorted(test for case, test in named if test not in CASES.get(case, ())) == []


def cases_of(name: str) -> list[str]:
    """Return the ids a test's name begins with: two of ``test_c1_c4_a_rank_that_fails``."""
    words = name.removeprefix("test_").upper().split("_")
    return list(takewhile(KNOWN.__contains__, words))
