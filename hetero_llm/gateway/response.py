"""Writes an answer to the client.

What one read from the engine brought (a head and a first chunk, say) goes to the client in one write: each write is a
system call. Nothing waits for the next read.
"""

from __future__ import annotations

import asyncio

from hetero_llm.gateway.openai_errors import status_line
from hetero_llm.gateway.request import Headers, RequestHead
from hetero_llm.gateway.routes import NOT_FOR_CLIENT


class ResponseWriter:
    """The answer to one request.

    Attributes:
        started: the head is written; a failure can no longer become an error status.
        status: the status written, 0 before.
        body_bytes: body bytes passed on, transfer coding not counted.
        is_event_stream: the body is server-sent events.
    """

    __slots__ = (
        "_bare",
        "_chunked",
        "_http_1_0",
        "_last",
        "_out",
        "_transport",
        "body_bytes",
        "is_event_stream",
        "started",
        "status",
    )

    def __init__(self, transport: asyncio.Transport, request: RequestHead) -> None:
        self._transport = transport
        self._http_1_0 = request.http_1_0
        self._bare = request.method == b"HEAD"
        self._chunked = False
        self._last = b""
        self._out: list[bytes] = []
        self.body_bytes = 0
        self.is_event_stream = False
        self.started = False
        self.status = 0

    def head(self, status: int, headers: Headers, own: bytes, *, keep_alive: bool) -> None:
        """Take an engine's head: its headers without those of its connection, then `own`."""
        lines = self._out
        lines.append(status_line(status))
        has_length = False
        for name, value in headers:
            if name in NOT_FOR_CLIENT:
                continue
            if name == b"content-length":
                has_length = True
            elif name == b"content-type" and value.startswith(b"text/event-stream"):
                self.is_event_stream = True
            lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(own)
        # A client of HTTP/1.0 gets the bare bytes; the closed connection marks their end.
        self._chunked = not (has_length or self._http_1_0 or status in (204, 304))
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self.started = True
        self.status = status

    def body(self, data: bytes) -> None:
        """Take body bytes."""
        self.body_bytes += len(data)
        self._last = data
        self._out.append(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def flush(self) -> None:
        """Write what was taken."""
        out = self._out
        if out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
            out.clear()

    def end(self) -> None:
        """Mark the body as complete and write."""
        if self._chunked:
            self._out.append(b"0\r\n\r\n")
        self.flush()

    def whole(self, status: int, headers: Headers, body: bytes, own: bytes, *, keep_alive: bool) -> None:
        """Write a complete answer of our own."""
        length = (b"content-length", str(len(body)).encode())
        self.head(status, [*headers, length], own, keep_alive=keep_alive)
        if not self._bare:
            self.body_bytes = len(body)
            self._out.append(body)
        self.flush()

    def fail(self, event: bytes, *, after: bytes) -> None:
        """End a started answer as failed: in a stream with `event`, unless its last event was `after`."""
        if self.is_event_stream and not self._last.endswith(after):
            # Half an event may be out; an empty line ends it.
            self.body(event if not self._last or self._last.endswith(b"\n\n") else b"\n\n" + event)
        self.break_off()

    def break_off(self) -> None:
        """Close without the mark of a complete body, so that no client takes the answer for whole."""
        self.flush()
        self._transport.close()
