"""A stand-in for an engine's HTTP server: a process boundary, so the gateway's tests may fake it.

Each request is handed to `FakeEngine.behave`, a coroutine that writes raw bytes and may misbehave in every way an
engine can. What the gateway sent, and when it hung up, is recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from hetero_llm.model import Target


@dataclass
class EngineRequest:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)


Behaviour = Callable[[EngineRequest, asyncio.StreamWriter], Awaitable[None]]


class HangUp(Exception):
    """Raised by a behaviour: close the connection. `reset` sends RST instead of FIN."""

    def __init__(self, *, reset: bool = False) -> None:
        self.reset = reset


class FakeEngine:
    def __init__(
        self, name: str, behave: Behaviour, *, model: str = "m", kind: str = "cpu", simulated: bool = False
    ) -> None:
        self.name = name
        self.model = model
        self.kind = kind
        self.simulated = simulated
        self.behave = behave
        self.requests: list[EngineRequest] = []
        self.connections = 0
        self.arrived = asyncio.Condition()
        self.host, self.port = "127.0.0.1", 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def target(self) -> Target:
        return Target(
            replica=self.name,
            model=self.model,
            kind=self.kind,
            accelerator="x",
            host=self.host,
            port=self.port,
            simulated=self.simulated,
        )

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self._server = await asyncio.start_server(self._serve, host, port, limit=256 * 1024 * 1024)
        self.host, self.port = self._server.sockets[0].getsockname()[:2]

    async def stop(self, *, reset: bool = False) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            _close(writer, reset=reset)
        await self._server.wait_closed()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def wait_for_requests(self, count: int) -> None:
        async with self.arrived:
            await asyncio.wait_for(self.arrived.wait_for(lambda: len(self.requests) >= count), 20)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        try:
            while (request := await _read_request(reader)) is not None:
                async with self.arrived:
                    self.requests.append(request)
                    self.arrived.notify_all()
                if not await self._answer(request, reader, writer):
                    break
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, request: EngineRequest, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Run the behaviour until it ends or the gateway hangs up."""
        behaving = asyncio.ensure_future(self.behave(request, writer))
        watching = asyncio.ensure_future(_wait_for_hang_up(reader, writer))
        try:
            await asyncio.wait((behaving, watching), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                request.hung_up.set()
                return False
            try:
                await behaving
            except HangUp as order:
                _close(writer, reset=order.reset)
                return False
            return True
        finally:
            for task in (behaving, watching):
                task.cancel()
            await asyncio.gather(behaving, watching, return_exceptions=True)


async def _wait_for_hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # The stream's reader buffers on; looking at it is the only way to learn of an end without taking bytes from it.
    while not (reader.at_eof() or reader.exception() or writer.transport.is_closing()):  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def _close(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def _read_request(reader: asyncio.StreamReader) -> EngineRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    length = int(next((value for name, value in headers if name == "content-length"), "0"))
    return EngineRequest(method, target, headers, await reader.readexactly(length))


# -- behaviours -------------------------------------------------------------------------------------------------------


def answers(body: bytes = b'{"ok": true}', status: int = 200, headers: str = "", after_s: float = 0.0) -> Behaviour:
    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{headers}content-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

    return behave


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int) -> bytes:
    return b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "%d"}}]}\n\n' % number


async def _stream(writer: asyncio.StreamWriter, events: int, gap_s: float) -> None:
    writer.write(SSE_HEAD)
    for number in range(events):
        writer.write(chunk(event(number)))
        await writer.drain()
        await asyncio.sleep(gap_s)


def streams(events: int = 3, gap_s: float = 0.0) -> Behaviour:
    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await _stream(writer, events, gap_s)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    return behave


def dies_mid_stream(events: int = 2, *, reset: bool = False, tail: bytes = b"") -> Behaviour:
    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await _stream(writer, events, 0.0)
        writer.write(tail)
        await writer.drain()
        # A reset throws away what the receiver has not read yet; real engines die a moment after their last token.
        await asyncio.sleep(0.05)
        raise HangUp(reset=reset)

    return behave


def says(*pieces: bytes, then_hang_up: bool = False) -> Behaviour:
    """Write exactly these bytes."""

    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        if then_hang_up:
            raise HangUp

    return behave


def dies_before_head(*, reset: bool = False) -> Behaviour:
    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        raise HangUp(reset=reset)

    return behave


def hangs() -> Behaviour:
    async def behave(request: EngineRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(3600)

    return behave


@contextlib.asynccontextmanager
async def engines(*fakes: FakeEngine) -> AsyncIterator[None]:
    for fake in fakes:
        await fake.start()
    try:
        yield
    finally:
        for fake in fakes:
            await fake.stop()
