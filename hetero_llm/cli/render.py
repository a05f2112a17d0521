"""Everything that is printed: data on stdout, talk on stderr, one error format, tables that fit where they go."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

from hetero_llm.errors import ErrorReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table as RichTable

SCHEMA_VERSION = 1
FILE_COLUMNS = 200
"""Table width where there is no terminal: nothing is cut, long cells wrap."""

UNMEASURED = "-"


class ReaderLeft(Exception):
    """Stdout is a pipe whose reader has ended (``… | head``). No OSError: click would exit with 1 for that."""


class Format(StrEnum):
    """What ``-o`` takes."""

    TABLE = "table"
    JSON = "json"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows for people and for `awk`. A cell that is None shows as ``-``.

    Attributes:
        columns: names, lower case.
        rows: as many cells as columns.
        title: above the table; None for none.
        empty: said instead of a table without rows.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    title: str | None = None
    empty: str = "nothing to show"


def show(output: Format, data: object, *tables: Table) -> None:
    """Print a reading verb's answer on stdout: `data` as JSON, or `tables`."""
    if output is Format.JSON:
        line(json.dumps({"schema": SCHEMA_VERSION, "data": data}, ensure_ascii=False))
    elif output is Format.PLAIN:
        for table in tables:
            _plain(table)
    else:
        for table in tables:
            _rich(table)


def line(text: str = "", *, end: str = "\n") -> None:
    """Write to stdout at once.

    Raises:
        ReaderLeft: nobody reads any more.
    """
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError as error:
        raise ReaderLeft from error


def say(text: str = "") -> None:
    """Write to stderr: progress, notes, warnings. A terminal that was closed does not stop what runs."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def say_inline(text: str) -> None:
    """Write to stderr without ending the line: a prompt."""
    print(text, end="", file=sys.stderr, flush=True)


def error(report: ErrorReport, output: Format = Format.TABLE) -> None:
    """Print an error: ``error[HLnnn]: …`` on stderr, or as JSON on stdout where JSON was asked for."""
    if output is Format.JSON:
        line(json.dumps({"schema": SCHEMA_VERSION, "error": dataclasses.asdict(report)}, ensure_ascii=False))
        return
    console = stderr_console()
    for text in error_lines(report):
        head, _, rest = text.partition(":")
        console.print(f"[bold red]{_escape(head)}[/]:{_escape(rest)}" if head.startswith("error[") else _escape(text))


def error_lines(report: ErrorReport) -> Iterable[str]:
    """Yield the lines of an error as text, for terminals and logs alike."""
    yield f"error[{report.code}]: {report.message}"
    if report.cause:
        yield f"  cause: {report.cause}"
    for step in report.next:
        yield f"  next: {step}"
    if report.log:
        yield f"  log: {report.log}"


def size(count_bytes: int | None) -> str | None:
    """Return a byte count in binary units with one decimal, ``79.6 GiB``; None stays None."""
    if count_bytes is None:
        return None
    value = float(count_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def marked(name: str, simulated: bool) -> str:
    """Return `name`, with a mark when no real hardware is behind it. Whoever shows devices or replicas uses this."""
    return f"{name} (simulated)" if simulated else name


def progress_text(done_bytes: int | None, total_bytes: int | None) -> str:
    """Return ``12.0 MiB of 98.0 MiB``, as far as known; empty when nothing is."""
    return " of ".join(text for text in (size(done_bytes), size(total_bytes)) if text is not None)


def stderr_is_terminal() -> bool:
    """Return whether someone watches stderr on a screen that can be redrawn."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


class LiveScreen:
    """A spot at the bottom of the terminal that is drawn again in place; lines printed go above it."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._live: Live | None = None

    def print(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, markup=False)

    def draw(self, content: str | Table) -> None:
        """Draw `content` in place of what was drawn before."""
        from rich.live import Live
        from rich.text import Text

        drawn = Text(content) if isinstance(content, str) else rich_table(content)
        if self._live is None:
            self._live = Live(drawn, console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        self._live.update(drawn, refresh=True)

    def close(self) -> None:
        """Leave the last drawing on the screen. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def stdout_console() -> Console:
    """Return a rich console on stdout that honours NO_COLOR and does not squeeze files into 80 columns."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the same on stderr."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() or os.environ.get("COLUMNS") else FILE_COLUMNS
    return Console(file=stream, width=width, highlight=False, soft_wrap=False, emoji=False)


def _rich(table: Table) -> None:
    if not table.rows:
        say(table.empty)
        return
    console = stdout_console()
    with console.capture() as captured:
        console.print(rich_table(table))
    line(captured.get(), end="")


def rich_table(table: Table) -> RichTable:
    """Return `table` as a rich table: no boxes, cells fold rather than lose text."""
    from rich import box
    from rich.table import Table as Drawn
    from rich.text import Text

    drawn = Drawn(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in table.columns:
        drawn.add_column(name, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell(value)) for value in row))
    return drawn


def cell(value: object) -> str:
    """Return a cell's text: None is ``-``, a sequence is joined by commas."""
    if value is None:
        return UNMEASURED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(str(item) for item in value) or UNMEASURED
    return str(value)


def _plain(table: Table) -> None:
    line("\t".join(table.columns))
    for row in table.rows:
        line("\t".join(cell(value).replace("\t", " ").replace("\n", " ") for value in row))


def _escape(text: Any) -> str:
    from rich.markup import escape

    return escape(str(text))
