"""Which cluster is meant, does it answer there, and does it let us in: asked before Ray is, which tries for minutes."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from hetero_llm.cluster import state
from hetero_llm.errors import ClusterUnreachable, NotRunning, UsageError

CONNECT_DEADLINE_S = 5.0
"""Time for a cluster to accept a TCP connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """A cluster as it is known on this machine.

    Attributes:
        address: ``host:port``, or a form Ray resolves.
        temp_dir: Ray's temporary folder when a command of this machine made it.
        token: file with the cluster's token, None when this machine keeps none.
    """

    address: str
    temp_dir: str | None = None
    token: str | None = None


def where(address: str | None) -> Whereabouts:
    """Return the cluster meant by `address`, else by ``RAY_ADDRESS``, else the only one of this machine.

    Raises:
        NotRunning: none is named, and this machine takes part in none or in several.
    """
    known = state.running_clusters()
    wanted = address or os.environ.get("RAY_ADDRESS")
    if not wanted and not known:
        raise NotRunning("nothing is being served from this machine", next=("hetero-llm serve",))
    if not wanted and len(known) > 1:
        choices = tuple(f"--address {name}   # {_what(record)}" for name, record in known.items())
        raise NotRunning(f"{len(known)} clusters run on this machine; name one", next=choices)
    chosen = wanted or next(iter(known))
    record = known.get(chosen)
    if record is None:
        return Whereabouts(address=chosen)
    return Whereabouts(address=chosen, temp_dir=record.temp_dir, token=state.token_path(record))


def _what(record: state.ServeRecord) -> str:
    return ", ".join(record.models) if record.role == "serve" else f"{record.role} {', '.join(record.nodes)}".strip()


def check_reachable(address: str) -> None:
    """Raise ClusterUnreachable when nothing accepts connections there."""
    if not has_port(address):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_DEADLINE_S).close()
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: no such port, no such host name
        raise ClusterUnreachable(
            f"no cluster answers at {address}",
            cause=str(error),
            next=("hetero-llm serve", "check --address and RAY_ADDRESS"),
        ) from error


def nobody_listens(address: str) -> bool:
    """Return whether a connection is refused there; False when that cannot be told, as over a network that is slow."""
    if not has_port(address):
        return False
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_DEADLINE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def check_welcome(address: str) -> None:
    """Raise ConnectionError when what listens there is not Ray, or refuses the token."""
    from hetero_llm.cluster.ray_private import refusal

    if has_port(address) and (why := refusal(address, CONNECT_DEADLINE_S)):
        raise ConnectionError(why)


def has_port(address: str) -> bool:
    """Return whether this is ``host:port``; "auto" and "ray://…" are Ray's to resolve."""
    return "/" not in address and ":" in address and address.rpartition(":")[2].isdecimal()


def make_token(path: Path) -> None:
    """Write a new token that only its owner can read; it is there whole or not at all."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.touch(mode=0o600)
    draft.write_text(secrets.token_hex(32))
    draft.replace(path)


def check_token(path: Path) -> None:
    """Find out early what Ray tells only its log, after 30 s.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the token in {path}", cause=error.strerror, next=_TOKEN_STEPS) from error
    if not content.strip():
        raise UsageError(f"the token file {path} is empty", next=_TOKEN_STEPS)


_TOKEN_STEPS = ("--token-file FILE", "unset RAY_AUTH_TOKEN_PATH   # to have a token made")


def use_token(path: str | Path) -> None:
    """Make this process, and what it starts, show the token in `path` from the next connection on."""
    os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray would prefer it
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
