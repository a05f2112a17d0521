"""The pipe from the process that owns the gateway: options first, then routing tables, one JSON document a line."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable

import msgspec

from hetero_llm.errors import UsageError
from hetero_llm.gateway.options import GatewayOptions
from hetero_llm.model import RoutingTable

LONGEST_LINE_BYTES = 64 * 1024 * 1024

_log = logging.getLogger(__name__)
_decode_options = msgspec.json.Decoder(GatewayOptions).decode
_decode_table = msgspec.json.Decoder(RoutingTable).decode


async def open_stdin() -> asyncio.StreamReader:
    """Return a reader of standard input, which must be a pipe, a socket or a terminal."""
    reader = asyncio.StreamReader(limit=LONGEST_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def read_options(reader: asyncio.StreamReader) -> GatewayOptions:
    """Read the first line.

    Raises:
        UsageError: the line is not the JSON of a `GatewayOptions`.
    """
    line = await reader.readline()
    try:
        return _decode_options(line)
    except msgspec.DecodeError as error:
        raise UsageError(
            "the gateway's first line of standard input is not its options",
            cause=str(error),
            next=("start the gateway through hetero-llm serve",),
        ) from error


async def follow(reader: asyncio.StreamReader, use: Callable[[RoutingTable], None]) -> None:
    """Hand every routing table to `use` until the pipe is closed. A line that is none is logged and passed over."""
    while line := await reader.readline():
        try:
            table = _decode_table(line)
        except msgspec.DecodeError as error:
            _log.error("a line on standard input is not a routing table: %s", error)
            continue
        use(table)
