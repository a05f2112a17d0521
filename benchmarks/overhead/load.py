"""The client: streaming chat requests as prepared bytes over kept-alive connections, looking at answers only briefly.

It shares the machine with what it measures, so it parses no HTTP and no JSON while the clock runs.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from benchmarks.served import Void

WORDS = ("river", "stone", "light", "garden", "paper", "winter", "signal", "engine", "market", "summer", "bridge")
PROMPT_WORDS = (20, 90)
RUN_DEADLINE_S = 300.0
_FIRST_TEXT = re.compile(rb'"content":"[^"]')
_END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_TAIL_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One request body, and the number of tokens it must bring."""

    body: bytes
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one pass over the requests gave.

    Attributes:
        first_text_s: per request, from sending it to the first text of its answer.
        tokens_per_s: generated tokens of all requests over the time of the whole pass.
        client_cores: CPU seconds per second of this client.
    """

    first_text_s: tuple[float, ...]
    tokens_per_s: float
    client_cores: float


def requests(model: str, count: int, tokens: tuple[int, int], seed: int) -> tuple[Request, ...]:
    """Return `count` requests, the same for the same seed.

    Their lengths lie between the two of `tokens`, so that concurrent requests do not march in step.
    """
    choice = random.Random(seed)
    return tuple(_request(model, number, choice.randint(*tokens), choice) for number in range(count))


def _request(model: str, number: int, tokens: int, choice: random.Random) -> Request:
    text = " ".join(choice.choices(WORDS, k=choice.randint(*PROMPT_WORDS)))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Story {number} about: {text}"}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Request(json.dumps(body).encode(), tokens)


async def run(url: str, todo: Sequence[Request], concurrency: int) -> Run:
    """Send all requests, `concurrency` at a time, each as soon as another is answered.

    Raises:
        Void: an answer failed, broke off, or has another number of tokens than asked for.
    """
    loop = asyncio.get_running_loop()
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.port is not None
    address = (where.hostname, where.port)
    left = iter(todo)
    clients = [
        (await loop.create_connection(lambda: _Client(where.netloc, left), *address))[1] for _ in range(concurrency)
    ]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for client in clients:
        client.next()
    async with asyncio.timeout(RUN_DEADLINE_S):
        await asyncio.gather(*(client.done for client in clients))
    took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return Run(
        first_text_s=tuple(seconds for client in clients for seconds in client.first_text_s),
        tokens_per_s=sum(request.tokens for request in todo) / took_s,
        client_cores=cpu_s / took_s,
    )


class _Client(asyncio.Protocol):
    """One connection: takes the next request when the last is answered."""

    def __init__(self, netloc: str, left: Iterator[Request]):
        self.first_text_s: list[float] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {netloc}\r\ncontent-type: application/json\r\n"
            "accept: application/json\r\ncontent-length: "
        ).encode()
        self._left = left
        self._request: Request | None = None
        self._tail = b""
        self._text_seen = False
        self._sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def next(self) -> None:
        self._request = next(self._left, None)
        if self._request is None:
            self._transport.close()
            self.done.set_result(None)
            return
        self._tail, self._text_seen = b"", False
        body = self._request.body
        self._sent_s = time.perf_counter()
        self._transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-_TAIL_BYTES:] if self._text_seen else self._tail + data
        if not self._text_seen and _FIRST_TEXT.search(self._tail):
            self.first_text_s.append(time.perf_counter() - self._sent_s)
            self._text_seen = True
        if self._tail.endswith(_END):
            self._check()

    def connection_lost(self, exc: Exception | None) -> None:
        self._void(f"a connection was closed in the middle of an answer: {exc or self._tail[-300:]!r}")

    def _check(self) -> None:
        assert self._request is not None
        usage = _USAGE.findall(self._tail)
        if not self._text_seen or not usage or int(usage[-1]) != self._request.tokens:
            self._void(f"an answer has {usage[-1:]} tokens instead of {self._request.tokens}: {self._tail[-300:]!r}")
            return
        self.next()

    def _void(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(Void(reason))
