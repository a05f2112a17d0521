"""Runs the gateway: uvicorn with our protocol, fed with routing tables, stopped by signal or by a closed pipe."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import socket
import sys
from collections.abc import Generator

import msgspec
import uvicorn

from hetero_llm.errors import HeteroError, UpstreamFailed
from hetero_llm.gateway.app import build_app
from hetero_llm.gateway.feed import follow, open_stdin, read_options
from hetero_llm.gateway.listen import BACKLOG, address_of, bind
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.gateway.protocol import GatewayProtocol
from hetero_llm.gateway.state import GatewayState

_TIDY_EVERY_S = 1.0


class GatewayServer(uvicorn.Server):
    """A uvicorn server that reports its address when it listens, and whose end is an exit status of 0."""

    def __init__(self, state: GatewayState, sock: socket.socket) -> None:
        options = state.options
        super().__init__(
            uvicorn.Config(
                build_app(state),
                http=functools.partial(GatewayProtocol, gateway=state),  # type: ignore[arg-type]
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=options.keep_alive_s,  # type: ignore[arg-type]
                timeout_graceful_shutdown=options.drain_s,  # type: ignore[arg-type]
            )
        )
        self.state = state
        self._sock = sock

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        await super().startup(sockets)
        # What lives now lives for good; the collector need not look at it again while requests run.
        gc.collect()
        gc.freeze()
        report({"listening": address_of(self._sock), "pid": os.getpid()})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end within `drain_s`, then cut the rest."""
        self.state.drain()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            if isinstance(connection, GatewayProtocol):
                connection.cut(UpstreamFailed("The gateway is stopping.", next=("retry",)))
        # One turn of the loop for the last bytes.
        await asyncio.sleep(0)

    def stop(self) -> None:
        """Begin to stop; a second order does not wait for running requests."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to `run`: uvicorn raises them again at the end, and the exit status would say killed."""
        yield


async def run() -> int:
    """Run a gateway on standard input and output; return its exit status."""
    reader = await open_stdin()
    try:
        options = await read_options(reader)
        sock = bind(options.host, options.port)
    except HeteroError as error:
        report({"error": error.report})
        return 1
    await _serve(options, sock, reader)
    return 0


async def _serve(options: GatewayOptions, sock: socket.socket, reader: asyncio.StreamReader) -> None:
    loop = asyncio.get_running_loop()
    state = GatewayState(options, loop)
    server = GatewayServer(state, sock)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    helpers = [loop.create_task(_follow(reader, state, server)), loop.create_task(_tidy(state))]
    try:
        await server.serve(sockets=[sock])
    finally:
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        state.pool.close_all()
        if state.access_log is not None:
            state.access_log.flush()


async def _follow(reader: asyncio.StreamReader, state: GatewayState, server: GatewayServer) -> None:
    try:
        await follow(reader, state.update)
    finally:
        if not server.should_exit:
            server.stop()


async def _tidy(state: GatewayState) -> None:
    while True:
        await asyncio.sleep(_TIDY_EVERY_S)
        state.pool.close_old()


def report(value: object) -> None:
    """Write one JSON line to standard output; the owner of the process reads it."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()
