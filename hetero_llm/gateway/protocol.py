"""The client's side: uvicorn's httptools protocol, with inference routes taken out of it and relayed as bytes.

Both kinds of request share one connection and its order: uvicorn keeps a pipeline of (cycle, app); an `Exchange` takes
a cycle's place in it.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from hetero_llm.errors import HeadTooLarge, HeteroError, MalformedRequest, MethodNotAllowed
from hetero_llm.gateway.openai_errors import error_body, error_headers, status_line
from hetero_llm.gateway.relay import Exchange
from hetero_llm.gateway.request import RequestHead
from hetero_llm.gateway.routes import INFERENCE_PATHS, path_of
from hetero_llm.gateway.state import GatewayState

LINGER_S = 30.0
"""How long the rest of a refused request is read and thrown away, so that the client gets to see the answer."""
MAX_PIPELINED = 16
MAX_PIPELINED_BYTES = 256 * 1024
_UPGRADE_HEADERS = frozenset((b"connection", b"upgrade", b"http2-settings"))


class GatewayProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        gateway: GatewayState,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.gateway = gateway
        self._current: Exchange | RequestResponseCycle | None = None
        self._in_head = True
        self._head_bytes = 0
        self._waiting_bytes = 0
        self._parse_error: HeteroError | None = None
        self._lingering: asyncio.TimerHandle | None = None

    @property
    def write_paused(self) -> bool:
        """Whether the client takes the answer more slowly than it comes."""
        return self.flow.write_paused

    # -- transport ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start, and give up on clients that never send anything."""
        super().connection_made(transport)
        self.gateway.metrics.clients += 1
        self._arm_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop everything that was done for this client."""
        self.gateway.metrics.clients -= 1
        for cycle in (self._current, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, Exchange):
                cycle.client_gone()
            elif cycle is not None:
                cycle.disconnected = True
                cycle.message_event.set()
        if self._lingering is not None:
            self._lingering.cancel()
        self._unset_keepalive_if_required()
        self.cycle = None  # type: ignore[assignment]
        self._current = None
        self.pipeline.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, within the limits."""
        if self._lingering is not None or self._parse_error is not None:
            return
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._reject(_not_http(error))
        else:
            if self._in_head and self._head_bytes > self.gateway.options.max_head_bytes:
                self._reject(self._head_too_large())
        if self.timeout_keep_alive_task is None and self._waits_for_client():
            self._arm_timeout()

    def _waits_for_client(self) -> bool:
        """Whether the next step is the client's: it has sent a part of a request only."""
        if self._lingering is not None or self.transport.is_closing():
            return False
        return self._current is None or (isinstance(self._current, Exchange) and self._current.receiving)

    def _arm_timeout(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def pause_writing(self) -> None:
        """The client's socket is full."""
        super().pause_writing()
        if isinstance(self._current, Exchange):
            self._current.client_slow()

    def resume_writing(self) -> None:
        """The client's socket has room again."""
        super().resume_writing()
        if isinstance(self._current, Exchange):
            self._current.client_ready()

    # -- parser -------------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Start of a request. uvicorn's scope is built later, for the requests that need one."""
        self.url = b""
        self.headers = []

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the request over if it is one to relay."""
        self._in_head = False
        if self.parser.should_upgrade() or self._lingering is not None or self.transport.is_closing():
            return  # parsed again without the upgrade, or not listened to any more
        if self._head_overruns():
            self._begin_exchange(self._head_too_large())
        elif path_of(self.url) in INFERENCE_PATHS:
            self._begin_exchange(None)
        else:
            self._begin_app_request()

    def on_body(self, body: bytes) -> None:
        """Give body bytes to whom they belong."""
        cycle = cast("Exchange | RequestResponseCycle", self.cycle)
        if isinstance(cycle, Exchange):
            cycle.feed(body)
            if cycle is not self._current:
                self._waiting_bytes += len(body)
                self._limit_pipelining()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is complete."""
        self._in_head = True
        self._head_bytes = 0
        if self.parser.should_upgrade():
            return
        cycle = cast("Exchange | RequestResponseCycle", self.cycle)
        if isinstance(cycle, Exchange):
            cycle.end_of_request()
        else:
            super().on_message_complete()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _head_overruns(self) -> bool:
        limit = self.gateway.options.max_head_bytes
        # What was received with the head bounds it from above; adding up is rarely needed.
        return self._head_bytes > limit and (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > limit
        )

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(
            f"The request line and headers are larger than {self.gateway.options.max_head_bytes} bytes.",
            next=("send fewer or shorter headers; prompts belong in the body",),
        )

    def _begin_exchange(self, refusal: HeteroError | None) -> None:
        head = RequestHead(
            self.parser.get_method(),
            self.url,
            self.headers,
            keep_alive=self.parser.should_keep_alive() and not self.gateway.draining,
            http_1_0=self.parser.get_http_version() == "1.0",
        )
        refusal = refusal or head.admit(self.gateway.keys, self.gateway.options.max_body_bytes)
        exchange = Exchange(self, self.gateway, head, refusal)
        previous = self.cycle
        self.cycle = cast(RequestResponseCycle, exchange)
        if previous is None or previous.response_complete:
            self._current = exchange
            exchange.start()
        else:
            self.pipeline.appendleft((self.cycle, self.app))
            self._limit_pipelining()

    def _begin_app_request(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url, self.headers = url, headers
        self.expect_100_continue = (b"expect", b"100-continue") in headers
        self.scope["headers"] = headers
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Start the next request of the pipeline, of either sort."""
        self._current = cycle
        if isinstance(cycle, Exchange):
            self._waiting_bytes = 0
            self.loop.call_soon(cycle.start)
        else:
            super()._start_asgi_task(cycle, app)

    def _limit_pipelining(self) -> None:
        # Reading goes on while a request runs, or a client's departure would not be seen. Not without limit, though.
        if len(self.pipeline) >= MAX_PIPELINED or self._waiting_bytes > MAX_PIPELINED_BYTES:
            self.flow.pause_reading()

    def finished(self, exchange: Exchange, *, linger: bool) -> None:
        """An exchange wrote its answer: go on with the next request, or close."""
        if linger:
            self._linger()
        elif not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Go on with the next request; if what followed was not HTTP, say so now."""
        self._current = None
        if self._lingering is not None:
            return
        super().on_response_complete()
        if self._current is None and self._parse_error is not None:
            self._answer_and_close(self._parse_error)

    def cut(self, error: HeteroError) -> None:
        """End what runs on this connection now, because the process stops."""
        if isinstance(self._current, Exchange):
            self._current.keep_alive = False
            self._current.cut(error)
        self.transport.close()

    # -- refusals -----------------------------------------------------------------------------------------------------

    def _reject(self, error: HeteroError) -> None:
        """Answer something that is no request, after the answers of the requests before it."""
        self._parse_error = error
        cycle = cast("Exchange | RequestResponseCycle | None", self.cycle)
        if isinstance(cycle, Exchange) and cycle.receiving:
            cycle.refuse(error)  # the framing of its body is broken
        elif self.cycle is None or self.cycle.response_complete:
            self._answer_and_close(error)

    def _answer_and_close(self, error: HeteroError) -> None:
        if self.transport.is_closing():
            return
        body = error_body(error)
        headers = [*error_headers(error), (b"content-length", str(len(body)).encode()), (b"connection", b"close")]
        lines = [status_line(error.http_status), *(b"%b: %b\r\n" % header for header in headers), b"\r\n", body]
        self.transport.write(b"".join(lines))
        self.gateway.metrics.refused(error.code, error.http_status)
        self._linger()

    def _linger(self) -> None:
        """Close politely: a socket closed with unread bytes resets the connection and destroys the answer under way."""
        if self._lingering is not None or self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _decline_upgrade(self, rest: bytes) -> None:
        """Go on in HTTP/1.1 and parse again without the offer: Java's client, for one, offers HTTP/2 every time."""
        if self.parser.get_method() == b"CONNECT":
            self._reject(MethodNotAllowed("CONNECT is not offered here.", next=("use POST",)))
            return
        kept = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        head = b"%b %b HTTP/1.1\r\n%b\r\n" % (self.parser.get_method(), self.url, b"".join(kept))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)


def _not_http(error: httptools.HttpParserError) -> MalformedRequest:
    return MalformedRequest("What was received is not an HTTP/1.1 request.", cause=str(error) or None)
