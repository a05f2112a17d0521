"""Our errors as OpenAI error objects, with the HLnnn code in `code` and the next steps beside the message."""

from __future__ import annotations

import http

import msgspec

from hetero_llm.errors import HeteroError

RETRY_AFTER_S = 2
"""Sent with every 502 and 503: about the time in which another replica or a restarted gateway table is there."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 408: "timeout_error", 429: "rate_limit_error"}


def error_object(error: HeteroError) -> dict[str, object]:
    """Return ``{"error": {...}}`` as OpenAI's clients expect it; `cause` and `next` are additions of ours."""
    report = error.report
    message = report.message if report.cause is None else f"{report.message} ({report.cause})"
    return {
        "error": {
            "message": message,
            "type": error_type(error.http_status),
            "param": None,
            "code": report.code,
            "next": list(report.next),
        }
    }


def error_type(status: int) -> str:
    """Return OpenAI's word for a class of errors."""
    return _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def error_body(error: HeteroError) -> bytes:
    """Return the error object as JSON."""
    return msgspec.json.encode(error_object(error))


def error_event(error: HeteroError) -> bytes:
    """Return the error object as one server-sent event."""
    return b"data: " + error_body(error) + b"\n\n"


def error_headers(error: HeteroError) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to the error's status."""
    headers = [(b"content-type", b"application/json")]
    if error.http_status in (502, 503):
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if error.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def status_line(status: int) -> bytes:
    """Return the first line of an HTTP/1.1 response."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in http.HTTPStatus}
