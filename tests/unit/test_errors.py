"""The error family: codes, round trips between processes, the catalogue."""

import pickle
import re

import pytest

from hetero_llm import errors
from hetero_llm.errors import ErrorReport, ExitCode, HeteroError

ALL = [errors.error_class(code) for code in errors.all_codes()]


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_has_a_code_of_its_group_and_a_text_to_explain_it(kind):
    assert re.fullmatch(r"HL[1-9]\d\d", kind.code)
    assert kind.__doc__
    assert len(kind.__doc__) > 30


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_all_it_says(kind):
    error = kind("what", cause="why", next=("one", "two"), log="/x.log")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert copy.report == ErrorReport(kind.code, "what", "why", ("one", "two"), "/x.log")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_only_what_the_user_typed_is_a_usage_error(kind):
    if kind.exit_code is ExitCode.USAGE:
        assert kind.code[:3] in {"HL1", "HL2"}


def test_a_report_of_another_process_becomes_its_typed_error():
    error = errors.from_report(ErrorReport("HL501", "it died", log="/x.log"))
    assert isinstance(error, errors.EngineFailed)
    assert str(error) == "it died"
    assert error.report.log == "/x.log"


def test_a_report_with_an_unknown_code_becomes_a_bug():
    assert isinstance(errors.from_report(ErrorReport("HL999", "?")), errors.InternalError)


def test_two_errors_cannot_share_a_code():
    with pytest.raises(TypeError, match=r"both claim HL301"):

        class Again(HeteroError):
            code = "HL301"


def test_an_unknown_code_has_no_class():
    assert errors.error_class("HL998") is None


def test_codes_are_listed_in_ascending_order():
    assert list(errors.all_codes()) == sorted(errors.all_codes())
