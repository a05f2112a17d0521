import pytest

from hetero_llm.errors import BodyTooLarge, KeyMissing, MalformedRequest, MethodNotAllowed
from hetero_llm.gateway.auth import KeyRing, hash_key
from hetero_llm.gateway.options import KeyRecord
from hetero_llm.gateway.request import Headers, RequestHead
from hetero_llm.gateway.routes import origin_form, path_of
from hetero_llm.model import Target

TARGET = Target(replica="a", model="m", kind="cpu", accelerator="x", host="10.0.0.1", port=81)
OPEN = KeyRing([])


def head(headers: Headers = [], *, method: bytes = b"POST", url: bytes = b"/v1/completions") -> RequestHead:  # noqa: B006
    return RequestHead(method, url, headers, keep_alive=True, http_1_0=False)


def sent(headers: Headers) -> list[str]:
    return head(headers).for_engine(TARGET, 5).decode().split("\r\n")[1:-2]


def test_the_engine_gets_its_own_host_and_the_length_of_the_body():
    lines = sent([(b"host", b"public"), (b"transfer-encoding", b"chunked")])
    assert "host: 10.0.0.1:81" in lines
    assert "content-length: 5" in lines
    assert not any("public" in line or "chunked" in line for line in lines)


def test_headers_of_the_client_are_passed_on():
    assert "traceparent: 00-1-2-01" in sent([(b"traceparent", b"00-1-2-01")])


@pytest.mark.parametrize(
    "name",
    ["authorization", "x-api-key", "x-hetero-kind", "x-hetero-priority", "x-request-timeout-s", "expect", "keep-alive",
     "te", "upgrade", "proxy-authorization"],
)  # fmt: skip
def test_headers_for_the_gateway_stay_with_it(name):
    assert not any(line.startswith(name) for line in sent([(name.encode(), b"5")]))


def test_headers_named_by_connection_stay_on_their_connection():
    lines = sent([(b"connection", b"keep-alive, X-Private"), (b"x-private", b"1"), (b"x-public", b"2")])
    assert not any(line.startswith("x-private") for line in lines)
    assert "x-public: 2" in lines


def test_the_request_id_of_the_client_is_kept():
    assert "x-request-id: abc-1" in sent([(b"x-request-id", b"abc-1")])


@pytest.mark.parametrize("value", [b"", b"a b", b"\xff", b"x" * 129])
def test_a_request_id_that_cannot_be_logged_is_replaced(value):
    assert head([(b"x-request-id", value)]).request_id.startswith(b"req-")


def test_an_ipv6_engine_is_addressed_in_brackets():
    target = Target(replica="a", model="m", kind="cpu", accelerator="x", host="::1", port=81)
    assert b"host: [::1]:81\r\n" in head().for_engine(target, 0)


def test_the_query_is_passed_on():
    line = head(url=b"/v1/completions?beta=true").for_engine(TARGET, 0).partition(b"\r\n")[0]
    assert line == b"POST /v1/completions?beta=true HTTP/1.1"


def test_another_method_is_not_allowed_and_the_right_one_is_named():
    wrong = head(method=b"GET")
    assert isinstance(wrong.admit(OPEN, 10), MethodNotAllowed)
    assert wrong.extra_error_headers == [(b"allow", b"POST")]


def test_a_length_over_the_limit_is_too_large():
    assert isinstance(head([(b"content-length", b"11")]).admit(OPEN, 10), BodyTooLarge)


def test_a_length_at_the_limit_is_taken():
    assert head([(b"content-length", b"10")]).admit(OPEN, 10) is None


def test_a_missing_key_is_noticed_before_the_size():
    keys = KeyRing([KeyRecord(name="a", sha256=hash_key("k"))])
    assert isinstance(head([(b"content-length", b"11")]).admit(keys, 10), KeyMissing)


@pytest.mark.parametrize("value", [b"0", b"-1", b"nan", b"inf", b"soon", b"", b"1e9"])
def test_a_timeout_that_is_no_positive_number_is_malformed(value):
    assert isinstance(head([(b"x-request-timeout-s", value)]).admit(OPEN, 10), MalformedRequest)


def test_a_timeout_is_read():
    timed = head([(b"x-request-timeout-s", b"1.5")])
    assert timed.admit(OPEN, 10) is None
    assert timed.timeout_s == 1.5


@pytest.mark.parametrize(
    ("url", "path", "origin"),
    [
        (b"/a/b", b"/a/b", b"/a/b"),
        (b"/a?x=/y", b"/a", b"/a?x=/y"),
        (b"http://host:80/a?x", b"/a", b"/a?x"),
        (b"http://host", b"/", b"/"),
        (b"*", b"*", b"/"),
    ],
)
def test_request_targets_are_read(url, path, origin):
    assert path_of(url) == path
    assert origin_form(url) == origin
