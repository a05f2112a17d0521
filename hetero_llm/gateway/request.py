"""The head of an inference request: what the gateway reads from it, and what an engine is sent."""

from __future__ import annotations

import os
import re

from hetero_llm.errors import (
    HeteroError,
    KeyMissing,
    KeyWrong,
    MalformedRequest,
    MethodNotAllowed,
)
from hetero_llm.gateway.auth import KeyRing
from hetero_llm.gateway.failures import too_large
from hetero_llm.gateway.routes import NOT_FOR_ENGINE, origin_form, path_of
from hetero_llm.model import Target

Headers = list[tuple[bytes, bytes]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
LONGEST_TIMEOUT_S = 24 * 3600.0


def new_request_id() -> bytes:
    """Return an id for a request that came without one."""
    return b"req-" + os.urandom(12).hex().encode()


class RequestHead:
    """Method, target and headers of one request, read once.

    Attributes:
        url: request target as it came.
        content_length: bytes announced, None when the body is chunked.
        keep_alive: the client wants to go on using the connection.
        http_1_0: the client does not understand chunked bodies.
        kind: value of ``x-hetero-kind``.
        timeout_s: value of ``x-request-timeout-s``.
        key_name: owner of the API key, set by `admit`.
        extra_error_headers: headers an error answer must carry besides its own.
    """

    __slots__ = (
        "_forwarded",
        "_nominated",
        "api_key",
        "authorization",
        "content_encoding",
        "content_length",
        "content_type",
        "expects_continue",
        "extra_error_headers",
        "http_1_0",
        "keep_alive",
        "key_name",
        "kind",
        "method",
        "path",
        "request_id",
        "timeout_s",
        "timeout_text",
        "url",
    )

    def __init__(self, method: bytes, url: bytes, headers: Headers, *, keep_alive: bool, http_1_0: bool) -> None:
        self.method = method
        self.url = url
        self.path = path_of(url)
        self.keep_alive = keep_alive and not http_1_0
        self.http_1_0 = http_1_0
        self.authorization: bytes | None = None
        self.api_key: bytes | None = None
        self.content_type = self.content_encoding = b""
        self.content_length: int | None = 0
        self.expects_continue = False
        self.extra_error_headers: Headers = []
        self.key_name: str | None = None
        self.kind: str | None = None
        self.request_id = b""
        self.timeout_s: float | None = None
        self.timeout_text: bytes | None = None
        self._nominated: tuple[bytes, ...] = ()
        self._forwarded: list[bytes] = []
        for name, value in headers:
            if name in NOT_FOR_ENGINE:
                self._note(name, value)
                continue
            if name == b"content-type":
                self.content_type = value
            elif name == b"content-encoding":
                self.content_encoding = value
            self._forwarded.append(b"%b: %b\r\n" % (name, value))
        if not self.request_id:
            self.request_id = new_request_id()

    def _note(self, name: bytes, value: bytes) -> None:
        if name == b"content-length":
            self.content_length = int(value)
        elif name == b"transfer-encoding":
            self.content_length = None
        elif name == b"authorization":
            self.authorization = value
        elif name == b"x-request-id":
            self.request_id = value if _REQUEST_ID.fullmatch(value) else b""
        elif name == b"connection":
            self._nominated += tuple(token.strip().lower() for token in value.split(b","))
        elif name == b"x-hetero-kind":
            self.kind = value.decode("latin-1").strip() or None
        elif name == b"x-request-timeout-s":
            self.timeout_text = value
        elif name == b"x-api-key":
            self.api_key = value
        elif name == b"expect":
            self.expects_continue = value.lower() == b"100-continue" and not self.http_1_0

    def admit(self, keys: KeyRing, max_body_bytes: int) -> HeteroError | None:
        """Check everything that needs no body; return what is wrong, None when nothing is."""
        if self.method != b"POST":
            self.extra_error_headers.append((b"allow", b"POST"))
            return MethodNotAllowed(
                f"{self.path.decode('latin-1')} takes POST, not {self.method.decode('latin-1')}.", next=("use POST",)
            )
        try:
            self.key_name = keys.check(self.authorization, self.api_key)
        except (KeyMissing, KeyWrong) as error:
            return error
        if self.content_length is not None and self.content_length > max_body_bytes:
            return too_large(max_body_bytes, self.content_length)
        return self._read_timeout()

    def _read_timeout(self) -> HeteroError | None:
        if self.timeout_text is None:
            return None
        try:
            timeout_s = float(self.timeout_text)
        except ValueError:
            timeout_s = 0.0
        if not 0.0 < timeout_s <= LONGEST_TIMEOUT_S:  # also false for nan
            return MalformedRequest(
                f"x-request-timeout-s must be a number of seconds above 0 and at most {LONGEST_TIMEOUT_S:g}.",
                cause=f"it is `{self.timeout_text.decode('latin-1')[:40]}`",
            )
        self.timeout_s = timeout_s
        return None

    def for_engine(self, target: Target, body_bytes: int) -> bytes:
        """Return the head to send to `target`: the client's headers minus ours and those of its connection."""
        host = f"[{target.host}]" if ":" in target.host else target.host
        forwarded = self._forwarded
        if self._nominated and self._nominated not in ((b"keep-alive",), (b"close",)):
            forwarded = [line for line in forwarded if line.partition(b":")[0] not in self._nominated]
        return b"POST %b HTTP/1.1\r\nhost: %b:%d\r\n%bx-request-id: %b\r\ncontent-length: %d\r\n\r\n" % (
            origin_form(self.url),
            host.encode(),
            target.port,
            b"".join(forwarded),
            self.request_id,
            body_bytes,
        )
