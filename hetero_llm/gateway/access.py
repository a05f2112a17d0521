"""What the access log says of one inference request."""

from __future__ import annotations

import time

from hetero_llm.gateway.request import RequestHead
from hetero_llm.model import Target


def access_record(
    head: RequestHead,
    status: int,
    *,
    code: str | None,
    target: Target | None,
    attempts: int,
    began_s: float,
    first_s: float | None,
    bytes_in: int,
    bytes_out: int,
) -> dict[str, object]:
    """Return one request's line of the access log; call when its answer is complete.

    Args:
        code: ``HLnnn`` when the answer is one of our errors.
        target: the replica that answered, None when none was chosen.
        began_s: `time.perf_counter` when the request's head was complete.
        first_s: the same when the first body byte of the answer arrived, None if none did.
    """
    return {
        "event": "request",
        "id": head.request_id.decode("latin-1"),
        "method": head.method.decode("latin-1"),
        "path": head.path.decode("latin-1"),
        "status": status,
        "code": code,
        "key": head.key_name,
        "model": target.model if target is not None else None,
        "replica": target.replica if target is not None else None,
        "kind": target.kind if target is not None else None,
        "attempts": attempts,
        "first_byte_ms": round((first_s - began_s) * 1000, 1) if first_s is not None else None,
        "ms": round((time.perf_counter() - began_s) * 1000, 1),
        "bytes_in": bytes_in,
        "bytes_out": bytes_out,
    }
