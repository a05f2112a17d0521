"""The listening socket, bound before anything is reported, so that a port in use is an error and not a surprise."""

from __future__ import annotations

import errno
import socket

from hetero_llm.errors import PortInUse, UsageError

BACKLOG = 2048


def bind(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket.

    Raises:
        PortInUse: another process listens there.
        UsageError: the host has no address here, or the port may not be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may have both; clients that try one family only try IPv4.
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except (OSError, OverflowError) as error:
        sock.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise PortInUse(
                f"port {port} on {host} is in use by another process",
                next=(f"hetero-llm serve --port {port + 1}", f"find the other process: ss -ltnp 'sport = :{port}'"),
            ) from error
        raise _cannot_listen(host, port, error) from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return ``host:port``, the host in brackets if it is IPv6."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cannot_listen(host: str, port: int, error: Exception) -> UsageError:
    return UsageError(
        f"cannot listen on {host} port {port}",
        cause=str(error),
        next=("--host takes an address of this machine, 127.0.0.1 or 0.0.0.0", "--port below 1024 needs privileges"),
    )
