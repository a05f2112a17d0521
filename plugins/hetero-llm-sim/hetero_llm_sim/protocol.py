"""HTTP/1.1 on an asyncio protocol: no framework, no task per request."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import httptools

_LARGEST_BODY_BYTES = 64 << 20
_JSON = b"application/json"
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


class Exchange:
    """One request and the way to answer it. Exactly one of `send`, `start_stream` … `end_stream`, `drop`, or silence.

    Attributes:
        closed: the client has left, or everything has been sent.
        on_close: called once when the client leaves before the answer is complete.
    """

    __slots__ = ("_protocol", "body", "closed", "keep_alive", "method", "on_close", "path")

    def __init__(self, protocol: Protocol, method: str, path: str, body: bytes, *, keep_alive: bool) -> None:
        self._protocol = protocol
        self.method, self.path, self.body, self.keep_alive = method, path, body, keep_alive
        self.closed = False
        self.on_close: Callable[[], None] | None = None

    @property
    def from_this_machine(self) -> bool:
        """Whether the client's address is loopback, or the very address it connected to."""
        return self._protocol.from_this_machine()

    def is_on(self, connection: Protocol) -> bool:
        """Tell whether the request came on this connection."""
        return self._protocol is connection

    def send(self, status: int, body: bytes, content_type: bytes = _JSON) -> None:
        """Answer whole."""
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
            content_type,
            len(body),
            b"" if self.keep_alive else b"connection: close\r\n",
        )
        self.write(head + body)
        self._finish()

    def start_stream(self) -> None:
        """Begin a streamed answer; `write` takes framed chunks from now on."""
        self.write(_STREAM_HEAD)

    def write(self, data: bytes) -> None:
        """Send bytes as they are; nothing happens when the client has left."""
        if not self.closed:
            self._protocol.write(data)

    def end_stream(self, data: bytes) -> None:
        """Send the last chunks and the end of the body."""
        self.write(data + b"0\r\n\r\n")
        self._finish()

    def _finish(self) -> None:
        if not self.closed:
            self.closed = True
            # It refers back to this exchange. A cycle less to collect is a pause less.
            self.on_close = None
            self._protocol.answered(keep_alive=self.keep_alive)


class Protocol(asyncio.Protocol):
    """One connection; requests on it are answered one after the other."""

    def __init__(self, handle: Callable[[Exchange], None], connections: set[Protocol]) -> None:
        self._handle = handle
        self._connections = connections
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._path = b""
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._closing = self._handing_on = False

    # -- asyncio -------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection."""
        # uvloop's transports are no subclass of asyncio's, they only behave like one.
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse what came; a broken request ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.close()
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the exchange under way that its client has left."""
        self._connections.discard(self)
        self._transport = None
        self._queue.clear()
        exchange, self._current = self._current, None
        if exchange is not None and not exchange.closed:
            exchange.closed = True
            on_close, exchange.on_close = exchange.on_close, None
            if on_close is not None:
                on_close()

    # -- httptools -----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._path, self._body, self._body_bytes = b"", [], 0

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._path += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Answer ``expect: 100-continue``; no other header matters to the engine."""
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Collect the body; too large a one ends the connection."""
        self._body_bytes += len(body)
        if self._body_bytes > _LARGEST_BODY_BYTES:
            self.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            self.close()
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Hand the request on, after those before it on this connection."""
        if self._closing:
            return
        method, path = self._parser.get_method().decode(), self._path.partition(b"?")[0].decode("latin-1")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._queue.append(Exchange(self, method, path, body, keep_alive=self._parser.should_keep_alive()))
        self._next()

    # -- for the exchange ----------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        """Send bytes if the connection still stands."""
        if self._transport is not None and not self._closing:
            self._transport.write(data)

    def answered(self, *, keep_alive: bool) -> None:
        """Go on to the next request, or close."""
        self._current = None
        if keep_alive:
            self._next()
        else:
            self.close()

    def close(self) -> None:
        """Close after what was written has gone out."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def from_this_machine(self) -> bool:
        """Tell whether both ends are on this machine."""
        if self._transport is None:
            return False
        peer = self._transport.get_extra_info("peername")[0]
        own = self._transport.get_extra_info("sockname")[0]
        return bool(peer == own or ipaddress.ip_address(peer.partition("%")[0]).is_loopback)

    def _next(self) -> None:
        # An answer that is given at once comes back here; the loop goes on instead of nesting.
        if self._handing_on:
            return
        self._handing_on = True
        while self._current is None and self._queue and not self._closing:
            self._current = exchange = self._queue.popleft()
            self._handle(exchange)
        self._handing_on = False
