"""One inference request: read, choose a replica, send, pass the answer through; retry before its first byte only.

An `Exchange` is driven by callbacks of two protocols, the client's (`protocol.py`) and the engine's (`upstream.py`).
No task runs per request or per chunk; the one exception is opening a new connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

from hetero_llm.errors import DeadlineExceeded, HeteroError, InternalError
from hetero_llm.gateway.access import access_record
from hetero_llm.gateway.body import BodyFacts, read_body
from hetero_llm.gateway.failures import too_large, upstream_failed
from hetero_llm.gateway.openai_errors import RETRY_AFTER_S, error_body, error_event, error_headers
from hetero_llm.gateway.request import RequestHead
from hetero_llm.gateway.response import ResponseWriter
from hetero_llm.gateway.state import GatewayState
from hetero_llm.gateway.upstream import UpstreamConnection
from hetero_llm.routing.reservation import Outcome, Reservation
from hetero_llm.telemetry.metrics import ReplicaCounters

MAX_ATTEMPTS = 2
CLIENT_CLOSED = 499
"""Logged and counted, never sent: the client left before its answer was complete."""
_RETRIED = {502: Outcome.FAILED, 503: Outcome.BUSY, 504: Outcome.BUSY}
_EARLY_REFUSAL_BYTES = 64 * 1024
_DONE = b"data: [DONE]\n\n"
_ENGINE_ERROR = (b'data: {"error":', b'data: {"object":"error"')

_log = logging.getLogger(__name__)


class ClientSide(Protocol):
    """What an exchange needs of the client's connection."""

    transport: asyncio.Transport

    @property
    def write_paused(self) -> bool:
        """Whether the client takes the answer more slowly than it comes."""

    def finished(self, exchange: Exchange, *, linger: bool) -> None:
        """The answer is written; `linger`: the request was not read to its end, so the connection must go."""


class Exchange:
    """One request and its answer.

    Attributes:
        response_complete: the answer is written, or will never be.
        keep_alive: the client's connection serves another request afterwards.
    """

    def __init__(self, client: ClientSide, state: GatewayState, head: RequestHead, refusal: HeteroError | None) -> None:
        self.client = client
        self.state = state
        self.head = head
        self.keep_alive = head.keep_alive
        self.response_complete = False
        self._refusal = refusal
        self._parts: list[bytes] = []
        self._size = 0
        self._body_done = False
        self._my_turn = False
        self._began_s = time.perf_counter()
        self._ready_s = self._sent_s = self._first_s = 0.0
        self._facts: BodyFacts | None = None
        self._body = b""
        self._tried: tuple[str, ...] = ()
        self._reservation: Reservation | None = None
        self._counters: ReplicaCounters | None = None
        self._upstream: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._writer = ResponseWriter(client.transport, head)
        self._skip_body = False

    # -- from the client's connection ---------------------------------------------------------------------------------

    def start(self) -> None:
        """It is this request's turn: earlier ones of the same connection have their answers."""
        if self.response_complete:
            return
        self._my_turn = True
        if self.head.timeout_s is not None and self._refusal is None:
            self._deadline = self.state.loop.call_later(self.head.timeout_s, self._out_of_time)
        if self._body_done:
            self._go()
        elif self._refusal is not None and self._worth_refusing_early():
            self._fail(self._refusal)
        elif self.head.expects_continue:
            self.client.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def feed(self, data: bytes) -> None:
        """Take a piece of the request body."""
        if self._refusal is not None or self.response_complete:
            return
        self._size += len(data)
        if self._size <= self.state.options.max_body_bytes:
            self._parts.append(data)
            return
        self.refuse(too_large(self.state.options.max_body_bytes))

    @property
    def receiving(self) -> bool:
        """Whether the request is not complete yet and still wanted."""
        return not self._body_done and not self.response_complete

    def refuse(self, error: HeteroError) -> None:
        """The rest of the request is not wanted, or will not come: answer with `error` when it is its turn."""
        self._parts.clear()
        self._refusal = error
        if self._my_turn:
            self._fail(error)

    def end_of_request(self) -> None:
        """The request is complete."""
        self._body_done = True
        if self._my_turn and not self.response_complete:
            self._go()

    def client_gone(self) -> None:
        """The client closed its connection: stop the engine, whatever it is doing."""
        if not self.response_complete:
            self._drop_upstream(Outcome.CANCELLED)
            self._finish(CLIENT_CLOSED)

    def client_slow(self) -> None:
        """The client's socket is full."""
        if self._upstream is not None:
            self._upstream.pause()

    def client_ready(self) -> None:
        """The client's socket has room again."""
        if self._upstream is not None:
            self._upstream.resume()

    def cut(self, error: HeteroError) -> None:
        """End the exchange now, because the process stops."""
        if not self.response_complete:
            self._drop_upstream(Outcome.CANCELLED)
            self._fail(error)

    # -- choosing and sending -----------------------------------------------------------------------------------------

    def _worth_refusing_early(self) -> bool:
        # A small body is on its way anyway; read it and keep the connection.
        length = self.head.content_length
        return self.head.expects_continue or length is None or length > _EARLY_REFUSAL_BYTES

    def _go(self) -> None:
        self._ready_s = time.perf_counter()
        try:
            if self._refusal is not None:
                raise self._refusal
            self._body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            self._facts = read_body(self._body, self.head.content_type, self.head.content_encoding)
            self._attempt(self._facts)
        except HeteroError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the last place where a bug can still get an answer
            self._bug(error)

    def _bug(self, error: Exception) -> None:
        _log.error("bug: a request could not be routed", exc_info=error)
        self._release(Outcome.CANCELLED)
        self._fail(InternalError("The gateway failed on this request.", cause=f"{type(error).__name__}: {error}"))

    def _attempt(self, facts: BodyFacts) -> None:
        reservation = self.state.router.choose(facts.model, self.head.kind, self._tried, facts.work)
        self._reservation = reservation
        self._tried += (reservation.target.replica,)
        self._counters = self.state.metrics.of(reservation.target)
        self._counters.decisions += 1
        self._counters.bytes_in += len(self._body)
        self._send()

    def _send(self, *, fresh: bool = False) -> None:
        assert self._reservation is not None
        target = self._reservation.target
        self._sent_s = time.perf_counter()
        connection = None if fresh else self.state.pool.take((target.host, target.port))
        if connection is not None:
            self._send_on(connection)
            return
        self._connecting = self.state.loop.create_task(self._connect((target.host, target.port)))
        self.state.tasks.add(self._connecting)
        self._connecting.add_done_callback(self.state.tasks.discard)

    async def _connect(self, address: tuple[str, int]) -> None:
        try:
            connection = await self.state.pool.connect(address)
        except OSError as error:
            self._connecting = None
            reason = "connect-timeout" if isinstance(error, TimeoutError) else "connect"
            self._replica_failed(reason, Outcome.UNREACHABLE)
        except Exception as error:  # noqa: BLE001  nobody else would tell the client
            self._connecting = None
            self._bug(error)
        else:
            self._connecting = None
            self._send_on(connection)

    def _send_on(self, connection: UpstreamConnection) -> None:
        assert self._reservation is not None
        self._upstream = connection
        if self.client.write_paused:
            connection.pause()
        connection.send(self, self.head.for_engine(self._reservation.target, len(self._body)), self._body)

    # -- from the engine's connection (ResponseSink) ------------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Pass the head on, or try another replica instead."""
        assert self._reservation is not None
        retried = _RETRIED.get(status)
        if retried is not None and self._try_another(f"status-{status}", retried):
            return
        if status in (502, 503) and not any(name == b"retry-after" for name, _ in headers):
            headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
        self._writer.head(status, headers, self._own_headers(), keep_alive=self.keep_alive)

    def on_body(self, data: bytes) -> None:
        """Pass body bytes on at once."""
        writer = self._writer
        if not self._first_s:
            self._first_s = time.perf_counter()
            if self._counters is not None:
                self._counters.first_token.observe(self._first_s - self._ready_s)
        if writer.is_event_stream and data.startswith(_ENGINE_ERROR):
            self._engine_gave_up(data)
            return
        writer.body(data)

    def on_pause(self) -> None:
        """All that was read so far has been taken."""
        self._writer.flush()

    def on_end(self) -> None:
        """The answer is complete."""
        self._upstream = None
        self._writer.end()
        status = self._writer.status
        # An engine that answers 500 may be about to die; it is not sent elsewhere, but it is no good sign either.
        self._release(_RETRIED.get(status, Outcome.FAILED if status >= 500 else Outcome.OK))
        self._finish(status)

    def on_lost(self, reason: str) -> None:
        """The engine's connection broke before the answer was complete."""
        connection, self._upstream = self._upstream, None
        if connection is not None and connection.reused and not connection.heard:
            # The engine closed a kept connection while our request was on its way: nobody's failure.
            self.state.metrics.reconnects += 1
            self._send(fresh=True)
            return
        self._replica_failed(reason, Outcome.FAILED)

    # -- failure ------------------------------------------------------------------------------------------------------

    def _replica_failed(self, reason: str, outcome: Outcome) -> None:
        if self._try_another(reason, outcome):
            return
        if self._counters is not None:
            self._counters.failed(reason)
        self._release(outcome)
        self._fail(upstream_failed(self._tried, reason, answering=self._writer.started))

    def _try_another(self, reason: str, outcome: Outcome) -> bool:
        """Move to another replica if nothing was passed on yet, tries are left and a replica is there."""
        assert self._facts is not None
        failed, counters = self._reservation, self._counters
        if self._writer.started or len(self._tried) >= MAX_ATTEMPTS or failed is None or counters is None:
            return False
        connection = self._upstream
        try:
            self._attempt_elsewhere(self._facts)
        except HeteroError:
            return False
        if connection is not None:
            connection.abort()
        counters.failed(reason)
        failed.release(outcome)
        return True

    def _attempt_elsewhere(self, facts: BodyFacts) -> None:
        connection, self._upstream = self._upstream, None
        try:
            self._attempt(facts)
        except HeteroError:
            self._upstream = connection
            raise
        self.state.metrics.retries += 1

    def _engine_gave_up(self, data: bytes) -> None:
        """The engine reports an error inside its stream: pass that event on, and nothing after it (no ``[DONE]``)."""
        self._writer.body(data.partition(b"\n\n")[0] + b"\n\n")
        if self._counters is not None:
            self._counters.failed("error-event")
        self._drop_upstream(Outcome.FAILED)
        self._writer.break_off()
        self._finish(self._writer.status)

    def _out_of_time(self) -> None:
        self._deadline = None
        if not self.response_complete:
            self._drop_upstream(Outcome.TIMED_OUT)
            self._fail(DeadlineExceeded(f"The request was not finished within {self.head.timeout_s:g} s."))

    def _drop_upstream(self, outcome: Outcome) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        connection, self._upstream = self._upstream, None
        if connection is not None:
            connection.abort()
        self._release(outcome)

    def _fail(self, error: HeteroError) -> None:
        """Answer with an error object, or, inside a stream, end it so that nobody takes it for complete."""
        if self._writer.started:
            self._writer.fail(error_event(error), after=_DONE)
            self._finish(self._writer.status, error)
            return
        if not self._body_done:
            self.keep_alive = False
        if self._reservation is None:
            self.state.metrics.refused(error.code, error.http_status)
        self._writer.whole(
            error.http_status,
            [*error_headers(error), *self.head.extra_error_headers],
            error_body(error),
            self._own_headers(),
            keep_alive=self.keep_alive,
        )
        self._finish(error.http_status, error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _release(self, outcome: Outcome) -> None:
        if self._reservation is not None:
            self._reservation.release(outcome)

    def _own_headers(self) -> bytes:
        lines = b"x-request-id: %b\r\n" % self.head.request_id
        if self._reservation is None:
            return lines
        target = self._reservation.target
        queued_ms = max(0, int((self._sent_s - self._ready_s) * 1000))
        if target.simulated:
            lines += b"x-hetero-simulated: true\r\n"
        return b"%bx-hetero-replica: %b\r\nx-hetero-kind: %b\r\nx-hetero-attempts: %d\r\nx-hetero-queue-ms: %d\r\n" % (
            lines,
            target.replica.encode(),
            target.kind.encode(),
            len(self._tried),
            queued_ms,
        )

    def _finish(self, status: int, error: HeteroError | None = None) -> None:
        self.response_complete = True
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._counters is not None:
            self._counters.answered(status)
            self._counters.bytes_out += self._writer.body_bytes
        if self.state.access_log is not None:
            self.state.access_log.write(
                access_record(
                    self.head,
                    status,
                    code=error.code if error is not None else None,
                    target=self._reservation.target if self._reservation is not None else None,
                    attempts=len(self._tried),
                    began_s=self._began_s,
                    first_s=self._first_s or None,
                    bytes_in=len(self._body) or self._size,
                    bytes_out=self._writer.body_bytes,
                )
            )
        if status != CLIENT_CLOSED:
            self.client.finished(self, linger=not self._body_done)
