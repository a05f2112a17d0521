"""What all connections of one gateway process share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from hetero_llm.gateway.auth import KeyRing
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.gateway.upstream import UpstreamPool
from hetero_llm.model import RoutingTable
from hetero_llm.routing.router import Router
from hetero_llm.telemetry.logging import AccessLog
from hetero_llm.telemetry.metrics import GatewayMetrics


class GatewayState:
    """Router, engine connections, counters and the routing table of one process.

    Attributes:
        table: the routing table in force.
        draining: the order to stop has come; no new request is taken.
    """

    def __init__(
        self, options: GatewayOptions, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self.loop = loop
        self.clock = clock
        self.keys = KeyRing(options.keys)
        self.router = Router(clock, options.max_in_flight_per_replica)
        self.pool = UpstreamPool(clock, options.connect_timeout_s)
        self.metrics = GatewayMetrics(self.router.in_flight)
        self.access_log = AccessLog(loop) if options.access_log else None
        self.table = RoutingTable(version=0)
        self.draining = False
        self.started_s = clock()
        self.tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def update(self, table: RoutingTable) -> None:
        """Put a new routing table in force; running requests are not touched."""
        self.table = table
        self.router.update(table)
        self.metrics.update(table.targets)
        self.pool.update(frozenset((target.host, target.port) for target in table.targets))
        self._notify()

    def drain(self) -> None:
        """Note that the process is about to stop, and wake those who watch."""
        self.draining = True
        self._notify()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for the next change; False when none came in time."""
        event = self._changed
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()
