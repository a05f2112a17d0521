"""Reads from a request body what routing needs, and nothing else; the body itself is forwarded as it came."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from hetero_llm.errors import MalformedRequest, UnsupportedRequest

DEFAULT_OUTPUT_TOKENS = 256
"""Output length assumed for the expected work when the client names no limit."""
MAX_OUTPUT_TOKENS = 1_000_000
"""Longest output counted as expected work, whatever the client asks for."""
BYTES_PER_TOKEN = 4
PREFILL_SHARE = 0.05
"""Cost of a prompt token in decoded tokens: prefill is parallel, decoding is not. Rough until capacities are fitted."""

_NEXT = ('send `{"model": "<name>", ...}`', "GET /v1/models lists the models served")
_BOUNDARY = re.compile(rb'boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_MODEL_FIELD = re.compile(rb'content-disposition:[^\r\n]*;\s*name="?model"?\s*(?:;|\r?$)', re.IGNORECASE | re.MULTILINE)


class _Fields(msgspec.Struct):
    # `Any`: what is wrong with these fields is for the engine to say, in its own words.
    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None


_decode = msgspec.json.Decoder(_Fields).decode


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """What routing knows of a request: the model asked for, and the expected work in decoded tokens."""

    model: str
    work: float


def read_body(body: bytes, content_type: bytes, content_encoding: bytes) -> BodyFacts:
    """Read model and expected work.

    Raises:
        MalformedRequest: not JSON (or form data), or no `model` in it.
        UnsupportedRequest: the body is compressed.
    """
    if content_encoding and content_encoding.lower() != b"identity":
        raise UnsupportedRequest(
            f"A request body with content-encoding `{content_encoding.decode('latin-1')[:40]}` is not read here.",
            next=("send the body uncompressed",),
        )
    if content_type[:20].lower().startswith(b"multipart/form-data"):
        return BodyFacts(_model_of_form(body, content_type), float(DEFAULT_OUTPUT_TOKENS))
    fields = _fields_of_json(body)
    return BodyFacts(_model_name(fields.model), _work(len(body), fields))


def _fields_of_json(body: bytes) -> _Fields:
    if not body.strip():
        raise MalformedRequest("The request has no body; a JSON object with `model` is expected.", next=_NEXT)
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "not a JSON object" if isinstance(error, msgspec.ValidationError) else "not valid JSON"
        raise MalformedRequest(f"The request body is {what}.", cause=str(error), next=_NEXT) from error


def _model_name(model: Any) -> str:
    if isinstance(model, str) and model:
        return model
    if model is None or model == "":
        raise MalformedRequest("You must provide a `model` parameter.", next=_NEXT)
    raise MalformedRequest(f"`model` must be text, not {type(model).__name__}.", next=_NEXT)


def _work(body_bytes: int, fields: _Fields) -> float:
    limit = fields.max_tokens or fields.max_completion_tokens or fields.max_output_tokens
    # A wish beyond any context is no measure of work; as a float it would swallow that of the other requests.
    output = min(limit, MAX_OUTPUT_TOKENS) if type(limit) is int and limit > 0 else DEFAULT_OUTPUT_TOKENS
    return PREFILL_SHARE * body_bytes / BYTES_PER_TOKEN + output


def _model_of_form(body: bytes, content_type: bytes) -> str:
    """Return the `model` field of form data (RFC 7578): a part's head, an empty line, its value, the boundary."""
    match = _BOUNDARY.search(content_type)
    if match is None:
        raise MalformedRequest("The form data names no boundary in content-type.")
    delimiter = b"--" + match[1]
    start = body.find(delimiter)
    while start >= 0:
        head_start = start + len(delimiter)
        head_end = body.find(b"\r\n\r\n", head_start)
        if head_end < 0:
            break
        start = body.find(b"\r\n" + delimiter, head_end)
        if start >= 0 and _MODEL_FIELD.search(body, head_start, head_end + 2):
            return _model_name(body[head_end + 4 : start].decode("utf-8", "replace").strip())
        start = start + 2 if start >= 0 else -1
    raise MalformedRequest("You must provide a `model` field in the form data.")
