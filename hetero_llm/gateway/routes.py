"""Which paths go to an engine, and which headers cross the gateway."""

from __future__ import annotations

INFERENCE_PATHS = frozenset(
    path.encode()
    for path in (
        "/v1/chat/completions",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/render",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
        "/v2/embed",
        "/v2/rerank",
        "/v1/audio/speech",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/classify",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/detokenize",
    )
)
"""Relayed with POST only. The stateful ``GET /v1/responses/{id}`` lives on one replica and is not offered."""

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Headers that concern one connection only (RFC 9110, 7.6.1)."""

NOT_FOR_ENGINE = HOP_BY_HOP | frozenset(
    (
        b"authorization",
        b"content-length",
        b"expect",
        b"host",
        b"x-api-key",
        b"x-hetero-kind",
        b"x-hetero-priority",
        b"x-hetero-session",
        b"x-request-id",
        b"x-request-timeout-s",
    )
)
"""Ours, or set anew for the engine."""

NOT_FOR_CLIENT = HOP_BY_HOP | frozenset((b"x-request-id",))
"""An engine's headers that are set anew for the client."""


def path_of(url: bytes) -> bytes:
    """Return the path of a request target, without its query; the absolute form (RFC 9112, 3.2.2) is understood."""
    if not url.startswith(b"/"):
        _, separator, rest = url.partition(b"://")
        url = b"/" + rest.partition(b"/")[2] if separator else url
    return url.partition(b"?")[0]


def origin_form(url: bytes) -> bytes:
    """Return the request target to send to an engine: path and query."""
    if url.startswith(b"/"):
        return url
    return b"/" + url.partition(b"://")[2].partition(b"/")[2]
