"""Starts the real gateway as a child process, the way its owner does, and talks raw HTTP to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from fake_engine import FakeEngine, engines

from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import ModelEntry, ReplicaStatus, RoutingTable, Target

PATIENCE_S = 30.0


def table(
    targets: Sequence[Target], *, models: Sequence[str] = ("m",), replicas: Sequence[ReplicaStatus] = ()
) -> RoutingTable:
    entries = [ModelEntry(name=name, source=f"/models/{name}", created_unix_s=1, kinds=("cpu",)) for name in models]
    return RoutingTable(version=1, models=tuple(entries), targets=tuple(targets), replicas=tuple(replicas))


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something that another process does is seen here."""
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


@dataclass
class Answer:
    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    complete: bool = True
    chunks: list[bytes] = field(default_factory=list)

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key == name), None)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json()["error"]


class RawClient:
    """One TCP connection, read strictly."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> Answer:
        text = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE_S)).decode("latin-1")
        first, *lines = text.split("\r\n")[:-2]
        headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(":") for line in lines)]
        return Answer(int(first.split(" ")[1]), headers)

    async def chunk(self) -> bytes | None:
        """Return the next chunk, b"" for the last one, None when the connection ended without it."""
        try:
            size = int((await asyncio.wait_for(self.reader.readuntil(b"\r\n"), PATIENCE_S)).strip(), 16)
            return (await asyncio.wait_for(self.reader.readexactly(size + 2), PATIENCE_S))[:-2]
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def answer(self, *, bare: bool = False) -> Answer:
        answer = await self.head()
        length = answer.header("content-length")
        if bare:
            return answer
        if answer.header("transfer-encoding") == "chunked":
            while piece := await self.chunk():
                answer.chunks.append(piece)
            answer.complete = piece == b""
            answer.body = b"".join(answer.chunks)
        elif length is not None:
            try:
                answer.body = await asyncio.wait_for(self.reader.readexactly(int(length)), PATIENCE_S)
            except asyncio.IncompleteReadError as error:
                answer.body, answer.complete = error.partial, False
        else:
            answer.body = await asyncio.wait_for(self.reader.read(), PATIENCE_S)
        return answer

    async def closed(self) -> bool:
        """Whether the gateway closes the connection without another byte."""
        try:
            return await asyncio.wait_for(self.reader.read(1), PATIENCE_S) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def post(
    body: bytes = b'{"model": "m"}',
    path: str = "/v1/chat/completions",
    headers: str = "",
    *,
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    head = f"{method} {path} HTTP/{version}\r\nhost: gateway\r\n{headers}"
    if "content-length" not in headers and "transfer-encoding" not in headers:
        head += f"content-length: {len(body)}\r\n"
    return head.encode("latin-1") + b"\r\n" + body


class GatewayProcess:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.listening: dict[str, Any] = {}
        self._stderr = asyncio.ensure_future(self._read_stderr())
        self.log: list[str] = []

    async def _read_stderr(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())

    @property
    def port(self) -> int:
        return int(self.listening["listening"].rpartition(":")[2])

    @property
    def url(self) -> str:
        return f"http://{self.listening['listening']}"

    async def tell(self, value: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(value) + b"\n")
        await self.process.stdin.drain()

    async def update(self, new: RoutingTable) -> None:
        """Put a table in force and wait until it is."""
        await self.tell(new)
        while True:
            status = (await self.request(post(b"", "/status", method="GET"))).json()
            if [card["id"] for card in status["data"]["models"]] == [entry.name for entry in new.models] and set(
                status["data"]["gateway"]["in_flight"]
            ) == {target.replica for target in new.targets}:
                return
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        host = self.listening["listening"].rpartition(":")[0].strip("[]")
        client = RawClient(*await asyncio.open_connection(host, self.port, limit=16 * 1024 * 1024))
        try:
            yield client
        finally:
            await client.close()

    async def request(self, data: bytes, *, bare: bool = False) -> Answer:
        async with self.client() as client:
            await client.send(data)
            return await client.answer(bare=bare)

    @contextlib.asynccontextmanager
    async def serving(self, *fakes: FakeEngine, models: Sequence[str] = ("m",)) -> AsyncIterator[None]:
        """Put `fakes` behind this gateway for a while; afterwards it must hold no request."""
        async with engines(*fakes):
            await self.update(table([fake.target for fake in fakes], models=models))
            yield
            assert await self.idle()
        await self.update(table([], models=()))

    async def status(self) -> dict[str, Any]:
        return (await self.request(post(b"", "/status", method="GET"))).json()["data"]

    async def metrics(self) -> str:
        return (await self.request(post(b"", "/metrics", method="GET"))).body.decode()

    async def idle(self) -> bool:
        """Wait until no reservation is left."""
        for _ in range(1000):
            if not any((await self.status())["gateway"]["in_flight"].values()):
                return True
            await asyncio.sleep(0.01)
        return False

    async def access_lines(self, count: int) -> list[dict[str, Any]]:
        """Wait for that many access lines of inference requests."""

        def lines() -> list[dict[str, Any]]:
            return [json.loads(line) for line in self.log if '"attempts":' in line]

        await eventually(lambda: len(lines()) >= count)
        return lines()

    async def end(self) -> int:
        """Close the pipe and wait for the end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self.process.stdin.wait_closed()
        code = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        await self._stderr
        return code


async def spawn() -> GatewayProcess:
    return GatewayProcess(
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "hetero_llm.gateway",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=16 * 1024 * 1024,
        )
    )


@contextlib.asynccontextmanager
async def gateway(*fakes: FakeEngine, models: Sequence[str] = ("m",), **options: Any) -> AsyncIterator[GatewayProcess]:
    """Run `fakes` and a gateway in front of them."""
    async with engines(*fakes), _spawned() as process:
        await process.tell(GatewayOptions(**{"port": 0, "drain_s": 5.0, **options}))
        assert process.process.stdout is not None
        process.listening = json.loads(await asyncio.wait_for(process.process.stdout.readline(), PATIENCE_S))
        if "listening" in process.listening and not options.get("keys"):
            await process.update(table([fake.target for fake in fakes], models=models))
        elif "listening" in process.listening:
            await process.tell(table([fake.target for fake in fakes], models=models))
            for _ in range(1000 if fakes else 0):
                if (await process.request(post(b"", "/ready", method="GET"))).status == 200:
                    break
                await asyncio.sleep(0.01)
        yield process


@contextlib.asynccontextmanager
async def _spawned() -> AsyncIterator[GatewayProcess]:
    process = await spawn()
    try:
        yield process
    finally:
        if process.process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await process.end()
        if process.process.returncode is None:
            process.process.send_signal(signal.SIGKILL)
            await process.process.wait()
        await process._stderr
        process.process._transport.close()
