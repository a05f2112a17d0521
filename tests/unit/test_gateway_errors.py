import json

import pytest

from hetero_llm.errors import HeteroError, all_codes, error_class
from hetero_llm.gateway.openai_errors import error_body, error_event, error_headers

REQUEST_ERRORS = [error_class(code) for code in all_codes() if code.startswith("HL6")]


@pytest.mark.parametrize("kind", REQUEST_ERRORS, ids=lambda kind: kind.code)
def test_every_request_error_is_an_openai_error_object(kind: type[HeteroError]):
    error = json.loads(error_body(kind("what", cause="why", next=("do",))))["error"]
    assert error["message"] == "what (why)"
    assert error["code"] == kind.code
    assert error["type"].endswith("_error")
    assert error["param"] is None
    assert error["next"] == ["do"]


def test_an_error_event_is_one_event():
    event = error_event(REQUEST_ERRORS[0]("two\n\nlines"))
    assert event.startswith(b"data: {")
    assert event.count(b"\n\n") == 1


@pytest.mark.parametrize("kind", [kind for kind in REQUEST_ERRORS if kind.http_status in (502, 503)])
def test_errors_that_pass_say_when_to_try_again(kind):
    assert b"retry-after" in dict(error_headers(kind("x")))
