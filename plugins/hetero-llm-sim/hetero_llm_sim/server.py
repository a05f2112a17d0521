"""The engine as a process: listen, carry out the faults that are the process's own, end on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from contextlib import suppress

import uvloop

from hetero_llm_sim.faults import Faults
from hetero_llm_sim.protocol import Exchange, Protocol
from hetero_llm_sim.service import Service, Settings


def run(settings: Settings, faults: Faults, host: str, port: int) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OSError: the address cannot be bound.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, faults, host, port))


def say(text: str) -> None:
    """Write one line of log."""
    sys.stderr.write(f"INFO {time.strftime('%m-%d %H:%M:%S')} [hetero_llm_sim] {text}\n")
    sys.stderr.flush()


def wait_for_end() -> None:
    """Sleep until SIGTERM or SIGINT: what the other nodes of a group do."""
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    signal.sigwait(numbers)


async def _serve(settings: Settings, faults: Faults, host: str, port: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    say("Loading weights: there are none")
    slow_start_s = faults.value_of("slow_start", 0.0)
    if slow_start_s:
        say(f"told to start slowly: {slow_start_s:g} s")
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), slow_start_s)
    for fault in faults.active:
        fault.since_s = time.monotonic()
    # What is there now stays for good; collections need not walk through it again.
    gc.freeze()
    if not ended.is_set():
        listener = Listener(Service(settings, faults, die=_die), host, port)
        await listener.start()
        await ended.wait()
        listener.close()


class Listener:
    """The listening socket, which a fault may close, and all connections."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._host, self._port = host, port
        self._connections: set[Protocol] = set()
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._changes: set[asyncio.Task[None]] = set()
        service.on_faults = self._on_faults

    async def start(self) -> None:
        """Listen, unless a fault forbids it, and say where."""
        self._port = await self._open(self._port)
        say(f"Application startup complete: listening on {self._host}:{self._port}")
        self._on_faults(None)

    def close(self) -> None:
        """Stop listening and hang up on everyone."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self._connections):
            connection.close()

    async def _open(self, port: int) -> int:
        loop = asyncio.get_running_loop()
        service, connections = self._service, self._connections
        self._server = await loop.create_server(lambda: Protocol(service.handle, connections), self._host, port)
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def _on_faults(self, exchange: Exchange | None) -> None:
        now_s, faults = time.monotonic(), self._service.faults
        slow_down = faults.value_of("slow_down", now_s)
        self._service.scheduler.slowdown = 1.0 if slow_down is None else slow_down
        if faults.value_of("refuse", now_s) is None:
            self._listen_again()
        else:
            self._refuse(exchange)
        if self._timer is not None:
            self._timer.cancel()
        end_s = faults.next_end_s(now_s)
        loop = asyncio.get_running_loop()
        # Once more than a tick later: then the fault is over for certain.
        self._timer = loop.call_later(end_s - now_s + 0.002, self._on_faults, None) if end_s is not None else None

    def _refuse(self, exchange: Exchange | None) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        # Who set the fault keeps its connection: it is the only way to end it before its time.
        for connection in tuple(self._connections):
            if exchange is None or not exchange.is_on(connection):
                connection.close()

    def _listen_again(self) -> None:
        if self._server is None and not self._changes:
            task = asyncio.get_running_loop().create_task(self._reopen())
            self._changes.add(task)
            task.add_done_callback(self._changes.discard)

    async def _reopen(self) -> None:
        try:
            await self._open(self._port)
        except OSError as error:
            say(f"cannot listen again: {error}")
        else:
            # The faults may have changed meanwhile.
            self._on_faults(None)


def _die(reason: str) -> None:
    say(f"told to die: {reason}")
    os.kill(os.getpid(), signal.SIGKILL)
