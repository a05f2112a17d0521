import pytest

from hetero_llm.errors import MalformedRequest, UnsupportedRequest
from hetero_llm.gateway.body import DEFAULT_OUTPUT_TOKENS, read_body

JSON = b"application/json"


def model(body: bytes, content_type: bytes = JSON) -> str:
    return read_body(body, content_type, b"").model


def test_the_model_is_read_from_json():
    assert model(b'{"messages": [{"role": "user", "content": "hi"}], "model": "m"}') == "m"


def test_the_content_type_is_not_insisted_on():
    assert model(b'{"model": "m"}', b"") == "m"


def test_the_last_of_two_model_fields_counts_as_in_the_engine():
    assert model(b'{"model": "a", "model": "b"}') == "b"


@pytest.mark.parametrize(
    "body",
    [b"", b"  \n", b"{", b"[]", b"null", b'"m"', b"12", b"{'model': 'm'}", b"\xff\xfe", b'{"model": "m"',
     b'{"model": "\xff"}', b'{"model": "m"} x'],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_malformed(body):
    with pytest.raises(MalformedRequest):
        model(body)


@pytest.mark.parametrize("body", [b"{}", b'{"model": null}', b'{"model": ""}'])
def test_a_body_without_model_says_that_one_must_be_given(body):
    with pytest.raises(MalformedRequest, match="You must provide a `model`"):
        model(body)


@pytest.mark.parametrize("value", [b"1", b"[]", b"{}", b"true"])
def test_a_model_that_is_no_text_is_malformed(value):
    with pytest.raises(MalformedRequest, match="must be text"):
        model(b'{"model": %b}' % value)


def test_nesting_without_end_is_malformed():
    with pytest.raises(MalformedRequest):
        model(b'{"model": "m", "x": ' + b"[" * 200_000)


def test_other_fields_of_a_wrong_type_are_left_to_the_engine():
    assert model(b'{"model": "m", "max_tokens": "many", "stream": "yes"}') == "m"


def test_a_compressed_body_is_not_supported():
    with pytest.raises(UnsupportedRequest, match="gzip"):
        read_body(b"\x1f\x8b", JSON, b"gzip")


def test_expected_work_grows_with_the_output_limit():
    assert read_body(b'{"model": "m", "max_tokens": 10}', JSON, b"").work == pytest.approx(10, abs=1)


@pytest.mark.parametrize("limit", [b"null", b"-5", b"0", b'"x"', b"1.5"])
def test_a_limit_that_makes_no_sense_counts_as_none(limit):
    work = read_body(b'{"model": "m", "max_tokens": %b}' % limit, JSON, b"").work
    assert work == pytest.approx(DEFAULT_OUTPUT_TOKENS, abs=1)


def test_an_absurd_output_limit_is_not_taken_for_work():
    assert read_body(b'{"model": "m", "max_tokens": %b}' % (b"9" * 500), JSON, b"").work < 2e6


def test_expected_work_grows_with_the_prompt():
    short, long = (read_body(b'{"model": "m", "prompt": "%b"}' % (b"x" * n), JSON, b"").work for n in (10, 100_000))
    assert long > short + 1000


FORM = (
    b'--XX\r\nContent-Disposition: form-data; name="file"; filename="model.wav"\r\nContent-Type: audio/wav\r\n\r\n'
    b'name="model"\r\n\x00\xff--X\r\n'
    b'--XX\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n--XX--\r\n'
)


def test_the_model_is_read_from_form_data():
    assert model(FORM, b"multipart/form-data; boundary=XX") == "whisper"


def test_a_quoted_boundary_is_understood():
    assert model(FORM, b'Multipart/Form-Data; boundary="XX"') == "whisper"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (FORM, b"multipart/form-data"),
        (FORM, b"multipart/form-data; boundary=YY"),
        (FORM.replace(b'"model"\r\n\r\nwhisper', b'"other"\r\n\r\nwhisper'), b"multipart/form-data; boundary=XX"),
        (b"", b"multipart/form-data; boundary=XX"),
        (b"--XX", b"multipart/form-data; boundary=XX"),
    ],
)
def test_form_data_without_model_is_malformed(body, content_type):
    with pytest.raises(MalformedRequest):
        model(body, content_type)
