"""The errors of a relayed request, in words for its client."""

from __future__ import annotations

from hetero_llm.errors import BodyTooLarge, NoReadyReplica, UpstreamFailed

_REASONS = {
    "connect": "the connection was refused",
    "connect-timeout": "no connection could be made in time",
    "eof": "the engine closed the connection",
    "reset": "the connection was reset",
    "not-http": "the answer was not HTTP",
}
"""How a replica fails, as counted in the metrics, and as told to a client."""

_NEVER_REACHED = ("connect", "connect-timeout")


def too_large(limit_bytes: int, announced_bytes: int | None = None) -> BodyTooLarge:
    """Return the error for a body over the limit; `announced_bytes` is its content-length if it has one."""
    size = "" if announced_bytes is None else f" of {announced_bytes} bytes"
    return BodyTooLarge(
        f"The request body{size} is larger than {limit_bytes} bytes.",
        next=("send a smaller body", "the operator can raise gateway.max_body_bytes"),
    )


def upstream_failed(tried: tuple[str, ...], reason: str, *, answering: bool) -> UpstreamFailed | NoReadyReplica:
    """Return the error for the last replica of `tried`; `answering`: its answer had begun.

    One that cannot be reached is not ready, whatever the routing table still says: nothing has been sent to it.
    """
    what = "failed while it answered" if answering else "failed, and no other could take the request"
    kind = NoReadyReplica if reason in _NEVER_REACHED else UpstreamFailed
    return kind(
        f"The replica {tried[-1]} {what}.",
        cause=f"{_REASONS[reason]}; tries: {len(tried)}",
        next=("retry", f"hetero-llm logs {tried[-1]} shows what the engine said"),
    )
