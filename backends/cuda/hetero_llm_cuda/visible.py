"""CUDA_VISIBLE_DEVICES as CUDA reads it: numbers or UUIDs up to the first word that is none; nothing if one repeats."""

from __future__ import annotations

import re
from collections.abc import Iterable

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
ORDER_ENV = "CUDA_DEVICE_ORDER"
PCI_ORDER = "PCI_BUS_ID"

_NUMBER = re.compile(r"[+]?\d+")
UUID_PREFIXES = ("GPU-", "MIG-")


def visible_ids(value: str | None) -> tuple[str, ...] | None:
    """Return the ids a value of CUDA_VISIBLE_DEVICES names, in its order; None when the variable is not set.

    Numbers lose signs and leading zeros. Reading stops at the first word that is neither, and a list of numbers at the
    first UUID and the other way round; a repeated id hides everything. As torch and the driver do it.
    """
    if value is None:
        return None
    prefix = next((prefix for prefix in UUID_PREFIXES if value.startswith(prefix)), None)
    ids: list[str] = []
    for word in value.split(","):
        found = _uuid(word, prefix) if prefix else _number(word.strip())
        if found in ids:
            return ()
        if found is None:
            break
        ids.append(found)
    return tuple(ids)


def ignored_words(value: str) -> tuple[str, ...]:
    """Return the words of a value that name nothing because of the grammar; ``-1`` and the empty value are meant so."""
    words = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1", "NoDevFiles"):
        return ()
    return tuple(words[len(visible_ids(value) or ()) :])


def names(ids: Iterable[str], number: int | None, uid: str) -> bool:
    """Tell whether one of `ids` means the device with this card number and UUID; a UUID may be shortened."""
    return any(word == str(number) or (word.startswith(UUID_PREFIXES) and uid.startswith(word)) for word in ids)


def _uuid(word: str, prefix: str) -> str | None:
    return word if word.startswith(prefix) else None


def _number(word: str) -> str | None:
    match = _NUMBER.match(word)
    return str(int(match[0])) if match else None
