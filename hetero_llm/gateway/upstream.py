"""Connections to engines: HTTP/1.1 with keep-alive, one request at a time, parsed as the bytes arrive."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

import httptools

Address = tuple[str, int]

_log = logging.getLogger(__name__)

IDLE_S = 4.0
"""Idle connections older than this are closed. vLLM closes its own after 5 s; being first avoids most stale ones."""
MAX_IDLE_PER_ENGINE = 256
_ONE_WRITE_BYTES = 64 * 1024
_VANISHED = (
    (socket.TCP_KEEPIDLE, 5),
    (socket.TCP_KEEPINTVL, 2),
    (socket.TCP_KEEPCNT, 3),
    # Keep-alive says nothing while sent data is not acknowledged; the kernel would try for a quarter of an hour.
    (socket.TCP_USER_TIMEOUT, 10_000),
)
"""A host that vanished without a word is noticed after 10 s or so, idle or not."""


class ResponseSink(Protocol):
    """Who receives an engine's answer. All calls come from the event loop, in this order, without a task between."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Status and headers (names in lower case) are complete."""

    def on_body(self, data: bytes) -> None:
        """Some bytes of the body, transfer coding removed."""

    def on_pause(self) -> None:
        """Nothing more was read for now: a good moment to write."""

    def on_end(self) -> None:
        """The answer is complete. The connection is no longer the sink's."""

    def on_lost(self, reason: str) -> None:
        """The connection ended before the answer did. `reason`: ``reset``, ``eof`` or ``not-http``."""


class UpstreamConnection(asyncio.Protocol):
    """One connection to an engine.

    Attributes:
        reused: the request under way is not the connection's first.
        heard: bytes of an answer to the request under way have arrived.
    """

    def __init__(self, pool: UpstreamPool, address: Address) -> None:
        self.address = address
        self.reused = False
        self.heard = False
        self.idle_since_s = 0.0
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._sink: ResponseSink | None = None
        self._transport: asyncio.Transport | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._until_eof = False
        self._complete = False
        self._keep_alive = True
        self._overrun = False
        self._informational = False
        self._paused = False

    # What the relay calls

    def send(self, sink: ResponseSink, head: bytes, body: bytes) -> None:
        """Send a request; its answer goes to `sink`."""
        assert self._transport is not None
        self._sink = sink
        self.heard = False
        self._complete = False
        if len(body) < _ONE_WRITE_BYTES:
            self._transport.write(head + body)  # a copy is cheaper than a second system call
        else:
            self._transport.writelines((head, body))

    def abort(self) -> None:
        """Close at once, forgetting the answer: this is how an engine learns that nobody listens any more."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.close()

    def pause(self) -> None:
        """Stop reading: the client takes the answer more slowly than the engine gives it."""
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    @property
    def open(self) -> bool:
        """Whether a request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make the kernel notice a host that vanished without a word."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but its bases
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _VANISHED:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        """Parse; the parser calls the sink while it runs."""
        if self._sink is None:
            self.abort()  # an engine that speaks unasked is out of step
            return
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if isinstance(error, httptools.HttpParserCallbackError):
                _log.error("bug: the relay failed on an engine's answer", exc_info=error)
            self._overrun = True
            if not self._complete:
                self._lose("not-http")
                self.abort()
                return
        if self._complete:
            self._finish()
        elif self._sink is not None:
            self._sink.on_pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the sink, unless the answer is one that ends with the connection."""
        self._pool.forget(self)
        if self._sink is None:
            return
        if self._until_eof and exc is None:
            self._finish()
        else:
            self._lose("eof" if exc is None else "reset")

    def _lose(self, reason: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.on_lost(reason)

    def _finish(self) -> None:
        sink, self._sink = self._sink, None
        self._complete = False
        if self._until_eof or self._overrun or not self._keep_alive:
            self.close()
        else:
            self.resume()
            self._pool.give(self)
        if sink is not None:
            sink.on_end()

    # What the parser calls

    def on_message_begin(self) -> None:
        """Start of a response, or of one of several (1xx); never of a second one to the same request."""
        self._overrun = self._complete
        self._headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Pass the head on; 1xx responses are between the engine and us."""
        status = self._parser.get_status_code()
        self._informational = status < 200
        if self._informational or self._overrun or self._sink is None:
            return
        self._until_eof = status not in (204, 304) and not any(
            name in (b"content-length", b"transfer-encoding") for name, _ in self._headers
        )
        self._sink.on_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Pass body bytes on."""
        if self._sink is not None and not self._overrun:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        """Remember the end; acted upon when the parser has returned, because the sink may send the next request."""
        if not self._informational:
            self._complete = True
            self._keep_alive = self._parser.should_keep_alive()  # the parser forgets with the next byte


class UpstreamPool:
    """Idle connections per engine, the most recently used first.

    Args:
        clock: monotonic seconds.
        connect_timeout_s: time to wait for a TCP connection.
    """

    def __init__(self, clock: Callable[[], float], connect_timeout_s: float) -> None:
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._idle: dict[Address, list[UpstreamConnection]] = {}
        self._known: frozenset[Address] = frozenset()

    def update(self, addresses: frozenset[Address]) -> None:
        """Close idle connections to engines that left the routing table; those in use end with their request."""
        self._known = addresses
        for address in [address for address in self._idle if address not in addresses]:
            for connection in self._idle.pop(address):
                connection.close()

    def take(self, address: Address) -> UpstreamConnection | None:
        """Return an idle connection, None when there is none."""
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if connection.open:
                connection.reused = True
                return connection
        return None

    async def connect(self, address: Address) -> UpstreamConnection:
        """Open a connection.

        Raises:
            OSError: refused, unreachable, or not answered in time (TimeoutError).
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_timeout_s):
            _, connection = await loop.create_connection(lambda: UpstreamConnection(self, address), *address)
        return connection

    def give(self, connection: UpstreamConnection) -> None:
        """Take back a connection whose answer is complete."""
        idle = self._idle.setdefault(connection.address, [])
        if connection.address not in self._known or len(idle) >= MAX_IDLE_PER_ENGINE:
            connection.close()
            return
        connection.idle_since_s = self._clock()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that the engine closed."""
        idle = self._idle.get(connection.address)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def close_old(self) -> None:
        """Close connections that have been idle for `IDLE_S`; call about once per second."""
        oldest_s = self._clock() - IDLE_S
        for idle in self._idle.values():
            while idle and idle[0].idle_since_s < oldest_s:
                idle.pop(0).close()

    def close_all(self) -> None:
        """Close every idle connection."""
        self.update(frozenset())
