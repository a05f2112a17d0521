"""Take secrets out of text that is to be shown to others: known ones by value, unknown ones by what they look like.

Rather too much is taken out than too little.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from hetero_llm.errors import FolderUnusable

REDACTED = "[redacted]"
PROMPT_LEFT_OUT = "[a line with what a user wrote, left out]"
SHORTEST_SECRET = 4
"""A shorter value would take half of the text with it."""

_SECRET_PARTS = frozenset({"apikey", "authorization", "cookie", "credential", "credentials", "key", "keys"})
_SECRET_PARTS |= {"passphrase", "passwd", "password", "secret", "token"}
_PLACE_PARTS = frozenset(("dir", "file", "home", "path"))
"""A name that ends so says where a secret lies, which is no secret."""

_NAME = r"[\w.-]*(?:api[_-]?keys?|secret|token|passw(?:or)?d|passphrase|authorization|credentials?)"
_PATTERNS = (
    re.compile(r"\b(hf_)[A-Za-z0-9]{8,}"),
    re.compile(r"\b(sk-)[\w-]{8,}"),
    re.compile(r"\b(AKIA)[0-9A-Z]{16}\b"),
    re.compile(r"(?i)\b((?:bearer|basic)\s+)[\w.~+/=-]{4,}"),
    re.compile(r"(://)[^/\s:@]+:[^/\s@]+(?=@)"),
    re.compile(rf"(?i)(--{_NAME}\s+)(?!-)\S+"),
    re.compile(rf"""(?i)(\b{_NAME}["']?\s*[:=]\s*["']?)(?!\[)[^\s"',;}}\]]+"""),
    re.compile(r"(\b)[0-9a-f]{64}\b"),
)
_PROMPT = re.compile(r"""(?i)\b(?:prompt|prompt_token_ids|messages|content|input|text_input)["']?\s*[:=]\s*["'\[]""")


class Redactor:
    """Knows the secrets of this user on this machine, and takes them out."""

    def __init__(self, secrets: Iterable[str] = (), home: str | None = None) -> None:
        # Longest first: one may contain another.
        self._secrets = sorted({text for text in secrets if len(text) >= SHORTEST_SECRET}, key=len, reverse=True)
        self._home = home

    def text(self, text: str) -> str:
        """Return `text`, any number of lines, without secrets, prompts, and the name of the home folder."""
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    def data(self, value: Any) -> Any:
        """Return builtins without secrets: by the name of a key, and inside every text."""
        if isinstance(value, Mapping):
            return {
                key: REDACTED if item and is_secret_name(str(key)) else self.data(item) for key, item in value.items()
            }
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Sequence):
            return [self.data(item) for item in value]
        return value

    def _line(self, line: str) -> str:
        if _PROMPT.search(line):
            return PROMPT_LEFT_OUT + ("\n" if line.endswith("\n") else "")
        for secret in self._secrets:
            line = line.replace(secret, REDACTED)
        for pattern in _PATTERNS:
            line = pattern.sub(rf"\1{REDACTED}", line)
        return line.replace(self._home, "~") if self._home else line


def is_secret_name(name: str) -> bool:
    """Tell whether a variable or a key of this name holds a secret: ``HF_TOKEN``, ``api_key``; not ``token_file``."""
    parts = [part for part in re.split(r"[^a-z0-9]+", name.lower()) if part]
    return bool(_SECRET_PARTS.intersection(parts)) and parts[-1] not in _PLACE_PARTS


def known_secrets(environ: Mapping[str, str], keys_file: Path | None = None) -> tuple[str, ...]:
    """Return the secrets that lie where they usually do: variables, token files, the gateway's key file."""
    found = [value for name, value in environ.items() if is_secret_name(name)]
    for path in _token_files(environ):
        found += _content(path)
    return (*found, *_api_keys(keys_file))


def _token_files(environ: Mapping[str, str]) -> tuple[Path, ...]:
    from hetero_llm.cluster.state import all_live_records, token_path

    try:
        records = all_live_records()
    except (FolderUnusable, OSError):  # no records, so no clusters of ours with tokens; the doctor tells of the folder
        records = ()
    hub = environ.get("HF_TOKEN_PATH") or f"{environ.get('HF_HOME') or '~/.cache/huggingface'}/token"
    ray = environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    clusters = (token_path(record) for record in records)
    return tuple(Path(path).expanduser() for path in (hub, ray, *clusters) if path)


def _content(path: Path) -> list[str]:
    try:
        return [path.read_text(encoding="utf-8", errors="replace").strip()]
    except OSError:  # nothing there that could leak
        return []


def _api_keys(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        entries = yaml.safe_load("".join(_content(path)))
    except yaml.YAMLError:  # not a file the gateway takes; its lines are never put into a bundle
        return []
    return [str(entry["key"]) for entry in entries or () if isinstance(entry, dict) and "key" in entry]


def redactor(keys_file: Path | None = None) -> Redactor:
    """Return one that knows the secrets of the calling process's user."""
    home = str(Path.home())
    return Redactor(known_secrets(os.environ, keys_file), home if home != "/" else None)
