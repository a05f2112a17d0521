"""Logs as JSON lines on standard error: one for each request, one for each thing worth telling."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from typing import Any, TextIO

import msgspec

_encode = msgspec.json.Encoder(enc_hook=str).encode


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line without a newline."""
        line: dict[str, Any] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _encode(line).decode()


def log_to_stderr(level: int = logging.INFO) -> None:
    """Send everything the process logs to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # uvicorn's notes about its own start and end would come before the line the owner of the process waits for.
    logging.getLogger("uvicorn.error").setLevel(max(level, logging.WARNING))


class AccessLog:
    """Writes one JSON line per finished request.

    Lines are gathered and written together a few times per second: one system call per request would cost as much as
    the routing of the request.
    """

    FLUSH_AFTER_S = 0.2

    def __init__(self, loop: asyncio.AbstractEventLoop, stream: TextIO | None = None) -> None:
        self._loop = loop
        self._stream = stream or sys.stderr
        self._lines: list[bytes] = []

    def write(self, fields: dict[str, Any]) -> None:
        """Queue a line. `fields` must be JSON-able; the time is added."""
        fields["ts"] = round(time.time(), 3)
        if not self._lines:
            self._loop.call_later(self.FLUSH_AFTER_S, self.flush)
        self._lines.append(_encode(fields))

    def flush(self) -> None:
        """Write what is queued."""
        if self._lines:
            text = b"\n".join(self._lines).decode()
            self._lines.clear()
            self._stream.write(text + "\n")
            self._stream.flush()
