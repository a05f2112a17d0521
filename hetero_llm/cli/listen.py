"""Where the gateway may listen: checked before anything is started."""

from __future__ import annotations

import errno
import ipaddress
import socket

from hetero_llm.errors import PortInUse, UnsafeBind, UsageError


def check_address(host: str, port: int, *, has_keys: bool, no_auth: bool) -> None:
    """Refuse an address that is open to others without a key, or that cannot be listened on now.

    Raises:
        UnsafeBind: not a loopback address, no keys, and not asked for with ``--no-auth``.
        PortInUse: another process listens there.
        UsageError: the address is none of this machine's, or the port needs a privilege.
    """
    addresses = _resolve(host, port)
    if not has_keys and not no_auth and not all(is_loopback(address) for _, address in addresses):
        raise UnsafeBind(
            f"listening on {host} without an API key would give the model to everyone who can reach it",
            next=("add --api-keys FILE", "or keep to --host 127.0.0.1", "or say --no-auth if that is what you want"),
        )
    if port:
        for family, address in addresses:
            _try_bind(family, address, port)


def is_loopback(address: str) -> bool:
    """Return whether an IP address in text form stays on this machine."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _resolve(host: str, port: int) -> list[tuple[int, str]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host}: not an address of this machine", cause=error.strerror) from error
    return list(dict.fromkeys((int(family), str(address[0])) for family, *_, address in found))


def _try_bind(family: int, address: str, port: int) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            raise _refused(error, address, port) from error


def _refused(error: OSError, address: str, port: int) -> PortInUse | UsageError:
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            f"port {port} on {address} is in use",
            cause=_holder(port),
            next=("choose another with --port N, or 0 for a free one", "hetero-llm status"),
        )
    return UsageError(f"cannot listen on {address} port {port}", cause=error.strerror, next=("--port 8000",))


def _holder(port: int) -> str | None:
    """Name the process that listens on `port`, as far as this user may see it."""
    import psutil

    try:
        listening = [item for item in psutil.net_connections("tcp") if item.status == psutil.CONN_LISTEN]
        pid = next((item.pid for item in listening if item.laddr and item.laddr.port == port and item.pid), None)
        return f"{psutil.Process(pid).name()} (process {pid}) listens there" if pid else None
    except psutil.Error:
        return None
