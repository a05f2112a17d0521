"""What the gateway process is told when it starts: the first line of its standard input, as JSON."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_BODY_BYTES = 64 * 1024 * 1024
"""Large enough for a few images inside a chat request; a body is held in memory until its answer begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRecord:
    """One API key, known by its hash only, so that neither a process list nor a dump shows the key.

    Attributes:
        name: who the key belongs to; appears in the access log.
        sha256: hash of the key's UTF-8 bytes, 64 lower-case hexadecimal digits.
    """

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Everything about one gateway process that does not change while it runs.

    Attributes:
        host: address to listen on; a name, an IPv4 or an IPv6 address.
        port: TCP port, 0 lets the system choose.
        keys: accepted API keys; empty means that no key is asked for.
        max_body_bytes: largest request body taken; a larger one is answered with 413.
        max_head_bytes: largest request line plus headers taken; larger ones are answered with 431.
        max_in_flight_per_replica: requests one replica may hold at a time, None for no limit.
        connect_timeout_s: time to wait for a TCP connection to an engine.
        keep_alive_s: how long an idle client connection stays open.
        drain_s: how long running requests may take to end after the order to stop.
        access_log: write one JSON line per request to standard error.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[KeyRecord, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    max_head_bytes: int = 64 * 1024
    max_in_flight_per_replica: int | None = None
    connect_timeout_s: float = 2.0
    keep_alive_s: float = 75.0
    drain_s: float = 10.0
    access_log: bool = True
