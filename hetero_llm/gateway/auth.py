"""API keys: read from a file by the one who starts the gateway, compared by hash in the gateway."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from hetero_llm.errors import KeyMissing, KeysUnreadable, KeyWrong
from hetero_llm.gateway.options import KeyRecord

_SHAPE = "the file is a list: `- {name: team-a, key: sk-...}`"


def hash_key(key: str) -> str:
    """Return the hash under which a key is known to the gateway."""
    return hashlib.sha256(key.encode()).hexdigest()


def load_keys(path: Path) -> tuple[KeyRecord, ...]:
    """Read ``keys.yaml``, a list of mappings with `name` and `key`.

    Raises:
        KeysUnreadable: the file is missing, not YAML, empty, of another shape, or names a key or a name twice.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise KeysUnreadable(f"cannot read the key file {path}", cause=str(error), next=(_SHAPE,)) from error
    except yaml.YAMLError as error:
        # The parser's own message may quote the line, and with it a key.
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where is not None else ""
        raise KeysUnreadable(f"the key file {path} is not YAML{line}", next=(_SHAPE,)) from None
    if not isinstance(data, list) or not data:
        raise KeysUnreadable(f"the key file {path} holds no list of keys", next=(_SHAPE,))
    records = tuple(_record(entry, number, path) for number, entry in enumerate(data, start=1))
    _refuse_twice([record.name for record in records], "name", path)
    _refuse_twice([record.sha256 for record in records], "key", path)
    return records


def _record(entry: Any, number: int, path: Path) -> KeyRecord:
    if not isinstance(entry, dict) or set(entry) != {"name", "key"}:
        raise KeysUnreadable(f"entry {number} of {path} must have exactly `name` and `key`", next=(_SHAPE,))
    for part in ("name", "key"):
        text = entry[part]
        if not isinstance(text, str) or not text or any(character.isspace() for character in text):
            raise KeysUnreadable(
                f"`{part}` of entry {number} of {path} must be text without blanks",
                next=("put it in quotes if it looks like a number", _SHAPE),
            )
    return KeyRecord(name=entry["name"], sha256=hash_key(entry["key"]))


def _refuse_twice(values: list[str], what: str, path: Path) -> None:
    for number, value in enumerate(values, start=1):
        if value in values[: number - 1]:
            first = values.index(value) + 1
            raise KeysUnreadable(f"entries {first} and {number} of {path} have the same {what}", next=(_SHAPE,))


class KeyRing:
    """The keys a gateway accepts. Without any, everybody is let in and is nobody in particular."""

    def __init__(self, keys: Sequence[KeyRecord]) -> None:
        self._by_hash = {record.sha256: record for record in keys}

    @property
    def required(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._by_hash)

    def check(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return the name of the key's owner, None when no key is asked for.

        Args:
            authorization: value of the ``authorization`` header; the scheme is ``Bearer``.
            api_key: value of ``x-api-key``, which Anthropic's clients send instead.

        Raises:
            KeyMissing: a key is asked for and none was sent.
            KeyWrong: the key sent is not one of ours.
        """
        if not self._by_hash:
            return None
        key = _bearer(authorization) or api_key
        if not key:
            raise KeyMissing(
                "This endpoint needs an API key.", next=("send the header `authorization: Bearer <your key>`",)
            )
        digest = hashlib.sha256(key).hexdigest()
        record = self._by_hash.get(digest)
        # The look-up is by hash, so its timing says nothing about a key; the comparison settles it all the same.
        if record is None or not hmac.compare_digest(record.sha256, digest):
            raise KeyWrong(
                "The API key is not valid here.", next=("check the key, or ask the operator of this endpoint for one",)
            )
        return record.name


def _bearer(authorization: bytes | None) -> bytes | None:
    if authorization is None:
        return None
    scheme, _, token = authorization.strip().partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None
