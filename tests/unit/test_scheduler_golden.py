"""Whole plans of whole clusters, as they were when somebody read them and found them right."""

import pytest
from golden_plans import CASES, FOLDER, plan_text


@pytest.mark.parametrize("name", CASES)
def test_the_plan_is_the_one_that_was_found_right(name: str):
    assert plan_text(CASES[name]) == (FOLDER / "plans" / f"{name}.txt").read_text()


def test_no_plan_is_kept_that_nobody_makes():
    assert {path.stem for path in (FOLDER / "plans").iterdir()} == set(CASES)
