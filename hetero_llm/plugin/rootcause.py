"""Find in an engine's log why it failed: the first real cause, not the summary that a parent process prints last.

An engine is several processes that write to one log. When one dies the others report it, each in its own words, so
the last error is the least useful. The backend's patterns come first; without a hit, the first exception of the first
traceback counts, worker and engine core before the API server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hetero_llm.plugin.engine import RootCausePattern

_LONGEST_MESSAGE = 500

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# "(EngineCore pid=123) ERROR 12-01 04:20:37 [core.py:133] text"; each part may be missing.
_PREFIX = re.compile(
    r"(?:\((?P<process>[A-Za-z][\w.:-]*)[^)]*\)\s?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL):? +(?:[\d-]+ )?[\d:.,]+ \[[^\]]*\] ?)?"
)
_HARMLESS = ("DEBUG", "INFO", "WARNING")
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?P<type>(?:\w+\.)*(?P<name>[A-Z]\w*))(?:: (?P<text>.*))?$")
# A usage error of argparse: "vllm serve: error: unrecognized arguments: --x".
_USAGE = re.compile(r"[\w.-]+(?: [\w-]+)*: error: (?P<text>.+)$")
_PLACE = re.compile(r'\s+File "(?P<file>[^"]+)", line (?P<line>\d+)')
_PYDANTIC = re.compile(r"\d+ validation errors? for (?P<where>\S+)")
_PYDANTIC_DETAIL = re.compile(r"\s+(?:Value error, |Assertion failed, )?(?P<text>.*?)(?: \[type=\w+, .*)?$")
_SUMMARY = re.compile(
    r"see (?:the )?(?:root cause|stack ?trace|stack trace \(above\))|check the stack trace above"
    r"|initialization failed due to an exception|engine core initialization failed|enginedeaderror",
    re.IGNORECASE,
)
_UNINFORMATIVE = ("KeyboardInterrupt", "SystemExit", "CancelledError", "BrokenPipeError", "EOFError")
_SILENT = "a process of the engine ended without saying why; it may have been killed for lack of memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootCause:
    """Why an engine failed.

    Attributes:
        message: the cause in one line.
        next: what to do; empty when only an exception was found.
        line: the log line that showed it, without its prefix.
    """

    message: str
    next: tuple[str, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class _Line:
    process: str
    level: str
    text: str


def find_root_cause(lines: Iterable[str], patterns: Sequence[RootCausePattern]) -> RootCause | None:
    """Return the root cause shown by the lines of a log, None when nothing in them looks like a failure.

    The first line that a specific pattern matches wins, then the first exception that is not a mere summary, then a
    pattern marked `generic`. A log with nothing but summaries (``see root cause above``) gives a message that says so
    in plain words. Lines logged as INFO or WARNING are never a cause. `lines` is read once
    and may be long.
    """
    search = _Search(patterns)
    for line in lines:
        if search.feed(_parse(line)):
            break
    return search.result()


class _Search:
    """Reads a log once, keeping the best candidate of each rank."""

    def __init__(self, patterns: Sequence[RootCausePattern]) -> None:
        self._patterns = patterns
        self._specific: RootCause | None = None
        self._generic: RootCause | None = None
        self._tracebacks: dict[str, _Traceback] = {}
        self._exceptions: list[tuple[str, RootCause]] = []
        self._summaries: list[RootCause] = []

    def feed(self, line: _Line) -> bool:
        """Take one line; True when the search is over."""
        if line.level in _HARMLESS:
            return False
        self._match(line)
        found = self._tracebacks.setdefault(line.process, _Traceback()).feed(line.text)
        if found is not None:
            self._note(line.process, found)
        if usage := _USAGE.match(line.text):
            self._note(line.process, RootCause(message=_shortened(usage["text"]), line=line.text))
        return self._specific is not None

    def result(self) -> RootCause | None:
        for process, traceback in self._tracebacks.items():
            if (found := traceback.finish()) is not None:
                self._note(process, found)
        inner = [cause for process, cause in self._exceptions if process and not process.startswith("APIServer")]
        ranked = [self._specific, *inner, *(cause for _, cause in self._exceptions), self._generic, *self._summaries]
        return next((cause for cause in ranked if cause is not None), None)

    def _match(self, line: _Line) -> None:
        for pattern in self._patterns:
            match = None if pattern.generic and self._generic else pattern.pattern.search(line.text)
            if match is None:
                continue
            cause = _from_pattern(pattern, match, line.text)
            if not pattern.generic:
                self._specific = cause
                return
            self._generic = cause

    def _note(self, process: str, cause: RootCause) -> None:
        if _SUMMARY.search(cause.message):
            self._summaries.append(RootCause(message=_SILENT, line=cause.line))
        elif cause.message.startswith(_UNINFORMATIVE):
            self._summaries.append(cause)
        else:
            self._exceptions.append((process, cause))


class _Traceback:
    """Follows the tracebacks of one process through its lines."""

    def __init__(self) -> None:
        self._inside = False
        self._indent = ""
        self._place = ""
        self._source = ""
        self._pending: re.Match[str] | None = None

    def feed(self, text: str) -> RootCause | None:
        """Take one line and return the exception it completes, if any."""
        if text.endswith(_TRACEBACK):
            found = self.finish()
            self._inside, self._indent = True, text[: -len(_TRACEBACK)]
            self._place = self._source = ""
            return found
        if self._pending is not None:
            return self._complete(text)
        if self._inside:
            self._follow(text)
        return None

    def finish(self) -> RootCause | None:
        """Return the exception whose second line never came."""
        match, self._pending = self._pending, None
        return _from_exception(match, "", self._place, self._source) if match else None

    def _follow(self, text: str) -> None:
        if place := _PLACE.match(text):
            self._place = f"{place['file'].rpartition('site-packages/')[2]}:{place['line']}"
        elif text.startswith(self._indent + " "):
            self._source = self._source if set(text.strip()) <= set("^~") else text.strip()
        elif match := _EXCEPTION.match(text.removeprefix(self._indent)):
            self._inside, self._pending = False, match

    def _complete(self, following: str) -> RootCause | None:
        match, self._pending = self._pending, None
        return _from_exception(match, following, self._place, self._source) if match else None


def _parse(line: str) -> _Line:
    text = _ANSI.sub("", line.rstrip("\r\n"))
    # A progress bar redraws itself with carriage returns; only what it showed last is a line.
    text = text.rpartition("\r")[2]
    match = _PREFIX.match(text)
    if match is None:
        return _Line("", "", text)
    return _Line(match["process"] or "", match["level"] or "", text[match.end() :])


def _from_pattern(pattern: RootCausePattern, match: re.Match[str], text: str) -> RootCause:
    groups = (match.group(0), *(group or "" for group in match.groups()))
    advice = tuple(step.format(*groups) for step in pattern.next)
    return RootCause(message=_shortened(pattern.message.format(*groups)), next=advice, line=text.strip())


def _from_exception(match: re.Match[str], following: str, place: str, source: str) -> RootCause:
    text = match["text"] or ""
    if validation := _PYDANTIC.match(text):
        detail = _PYDANTIC_DETAIL.match(following)
        text = f"{validation['where']}: {detail['text'] if detail else following.strip()}"
    elif not text:
        # "AssertionError" alone says nothing; the line it stands on does.
        text = " ".join(part for part in (source, f"({place})" if place else "") if part)
    message = f"{match['name']}: {text}" if text else match["name"]
    return RootCause(message=_shortened(message), line=match.group(0))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_MESSAGE else f"{text[: _LONGEST_MESSAGE - 1]}…"
