"""Read OpenAI requests: what the simulated engine honours, what has no effect, and what it refuses to pretend.

Sampling parameters have no effect: the text is that of temperature 0. What would change the shape of the answer and is
not simulated (several choices, log-probabilities, stop strings, structured output) is refused with 400.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from hetero_llm_sim.tokens import encode

COMPLETION_TOKENS = 16
"""Tokens of a completion whose request does not say, as OpenAI and vLLM have it."""

CHAT_TOKENS = 128
"""Tokens of a chat answer whose request does not say: the simulated model then stops by itself."""


class BadRequest(Exception):
    """A request that cannot be served; becomes an OpenAI error object with `status`."""

    def __init__(self, message: str, *, status: int = 400, kind: str = "BadRequestError", param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this engine serves: model names, context length in tokens, and whether it heeds priorities."""

    names: tuple[str, ...]
    max_model_len: int
    priorities: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """A request to generate, understood.

    Attributes:
        finish_reason: what ends the answer once `max_tokens` are there: ``length``, or ``stop`` by itself.
        token_ids: the answer carries token ids too.
        priority: lower goes first.
    """

    chat: bool
    model: str
    prompt: list[int]
    max_tokens: int
    finish_reason: str
    stream: bool
    include_usage: bool
    token_ids: bool
    priority: int


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = False
    priority: int | None = 0
    n: int | None = 1
    best_of: int | None = 1
    echo: bool | None = False
    suffix: str | None = None
    stop: Any = None
    logprobs: Any = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None


class _Tokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class _Detokenize(msgspec.Struct, kw_only=True):
    model: str | None = None
    tokens: list[int]


T = TypeVar("T")

_BODY = msgspec.json.Decoder(_Body)
_TOKENIZE = msgspec.json.Decoder(_Tokenize)
_DETOKENIZE = msgspec.json.Decoder(_Detokenize)


def read_generate(raw: bytes, limits: Limits, *, chat: bool) -> Generate:
    """Read the body of a chat or plain completion.

    Raises:
        BadRequest: not JSON, a field of the wrong type, something that is not simulated, an unknown model (404), or
            more tokens than the context length.
    """
    body = _decode(_BODY, raw)
    model = _model(body.model, limits)
    _refuse_what_is_not_simulated(body)
    prompt = render_chat(body.messages, body.tools) if chat else _prompt(body.prompt)
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if wanted is not None and wanted < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {wanted}", param="max_tokens")
    room = limits.max_model_len - len(prompt)
    if room < (wanted or 1):
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{wanted or 1} output tokens and your prompt contains {len(prompt)} input tokens.",
            param="max_tokens" if room > 0 else "input_tokens",
        )
    if body.priority and not limits.priorities:
        raise BadRequest("Got priority, but priority scheduling is not enabled", param="priority")
    return Generate(
        chat=chat,
        model=model,
        prompt=prompt,
        max_tokens=wanted or min(room, CHAT_TOKENS if chat else COMPLETION_TOKENS),
        finish_reason="stop" if wanted is None and chat else "length",
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        token_ids=bool(body.return_token_ids),
        priority=body.priority or 0,
    )


def read_tokenize(raw: bytes, limits: Limits) -> list[int]:
    """Return the tokens of a ``/tokenize`` body with a prompt or with messages; raises BadRequest."""
    body = _decode(_TOKENIZE, raw)
    _model(body.model, limits)
    return render_chat(body.messages, body.tools) if body.messages else _prompt(body.prompt)


def read_detokenize(raw: bytes, limits: Limits) -> list[int]:
    """Return the tokens of a ``/detokenize`` body; raises BadRequest."""
    body = _decode(_DETOKENIZE, raw)
    _model(body.model, limits)
    return body.tokens


def render_chat(messages: Sequence[dict[str, Any]] | None, tools: Sequence[dict[str, Any]] | None = None) -> list[int]:
    """Return the tokens of a chat in the ChatML template, ready for the answer; raises BadRequest."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    parts = [f"<|im_start|>tools\n{msgspec.json.encode(tools).decode()}<|im_end|>\n"] if tools else []
    for message in messages:
        parts.append(f"<|im_start|>{message.get('role')}\n{_content(message)}<|im_end|>\n")
    parts.append("<|im_start|>assistant\n")
    return encode("".join(parts))


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(_text_part(part) for part in content)
    if content is None:
        return msgspec.json.encode(message.get("tool_calls") or "").decode()
    if not isinstance(content, str):
        raise BadRequest("content must be a string or a list of parts", param="messages")
    return content


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    raise BadRequest("only text parts are simulated", param="messages")


def _prompt(prompt: Any) -> list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if prompt in ("", []):
        raise BadRequest("the prompt is empty", param="prompt")
    if isinstance(prompt, str):
        return encode(prompt)
    if not isinstance(prompt, list) or not all(type(token) is int and token >= 0 for token in prompt):
        raise BadRequest("prompt must be one text or one list of token ids", param="prompt")
    return prompt


def _model(name: str | None, limits: Limits) -> str:
    if name and name not in limits.names:
        raise BadRequest(f"The model `{name}` does not exist.", status=404, kind="NotFoundError", param="model")
    return name or limits.names[0]


def _refuse_what_is_not_simulated(body: _Body) -> None:
    refused = {
        "n": (body.n or 1) > 1,
        "best_of": (body.best_of or 1) > 1,
        "echo": body.echo,
        "suffix": body.suffix,
        "stop": body.stop,
        "logprobs": body.logprobs not in (None, False),
        "top_logprobs": body.top_logprobs,
        "prompt_logprobs": body.prompt_logprobs is not None,
        "response_format": body.response_format and body.response_format.get("type") != "text",
        "structured_outputs": body.structured_outputs,
    }
    for name, wanted in refused.items():
        if wanted:
            raise BadRequest(f"{name} is not simulated by this engine", param=name)


def _decode(decoder: msgspec.json.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body cannot be read: {error}") from error
