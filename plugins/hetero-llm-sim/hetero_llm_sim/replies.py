"""Write OpenAI answers, whole and streamed. A streamed token costs one concatenation: all else is made beforehand."""

from __future__ import annotations

from typing import Any

import msgspec

from hetero_llm_sim.requests import Generate
from hetero_llm_sim.tokens import FIRST_WORD, WORD_BYTES, decode

_encode = msgspec.json.encode


def error_body(message: str, kind: str, status: int, param: str | None = None) -> bytes:
    """Return an OpenAI error object as vLLM writes it."""
    return _encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


def frame(data: bytes) -> bytes:
    """Return one chunk of HTTP's chunked coding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Reply:
    """Makes the bytes of one answer."""

    __slots__ = ("_base", "_close", "_open", "_request")

    def __init__(self, request: Generate, number: int, created_unix_s: int) -> None:
        self._request = request
        kind = ("chatcmpl", "chat.completion") if request.chat else ("cmpl", "text_completion")
        object_name = f"{kind[1]}.chunk" if request.chat and request.stream else kind[1]
        self._base = {
            "id": f"{kind[0]}-{number:016x}",
            "object": object_name,
            "created": created_unix_s,
            "model": request.model,
        }
        self._open = self._close = b""
        if request.stream:
            self._prepare()

    def _prepare(self) -> None:
        # Cut a sample chunk at its text; every word of the engine has the same length, so the frame has, too.
        before, after = self._event(self._choice("\x00", None)).split(b"\\u0000")
        size = len(before) + len(WORD_BYTES[0]) + len(after)
        self._open, self._close = b"%x\r\n%b" % (size, before), after + b"\r\n"

    def chunks(self, token: int, *, first: bool, last: bool) -> bytes:
        """Return the framed events for one new token."""
        if not (first or last or self._request.token_ids):
            return self._open + WORD_BYTES[token - FIRST_WORD] + self._close
        events = frame(self._role()) if first and self._request.chat else b""
        choice = self._choice(decode((token,)), self._request.finish_reason if last else None)
        if self._request.token_ids:
            choice["token_ids"] = [token]
            if first and not self._request.chat:
                choice["prompt_token_ids"] = self._request.prompt
        return events + frame(self._event(choice))

    def ending(self, cached_tokens: int) -> bytes:
        """Return the framed usage, if asked for, and the end of the stream."""
        usage = b""
        if self._request.include_usage:
            usage = frame(_sse({**self._base, "choices": [], "usage": self._usage(cached_tokens)}))
        return usage + frame(b"data: [DONE]\n\n")

    def whole(self, tokens: list[int], cached_tokens: int) -> bytes:
        """Return the body of an answer that is not streamed."""
        request, text = self._request, decode(tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": request.finish_reason}
        choice |= {"message": {"role": "assistant", "content": text}} if request.chat else {"text": text}
        answer = {**self._base, "choices": [choice], "usage": self._usage(cached_tokens)}
        if request.token_ids:
            choice["token_ids"] = tokens
            (answer if request.chat else choice)["prompt_token_ids"] = request.prompt
        return _encode(answer)

    def _role(self) -> bytes:
        delta = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        ids = {"prompt_token_ids": self._request.prompt} if self._request.token_ids else {}
        return _sse({**self._base, **ids, "choices": [delta]})

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {"content": text}} if self._request.chat else {"text": text}
        return {"index": 0, **content, "logprobs": None, "finish_reason": finish_reason}

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _sse({**self._base, "choices": [choice]})

    def _usage(self, cached_tokens: int) -> dict[str, Any]:
        prompt, completion = len(self._request.prompt), self._request.max_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _sse(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"
