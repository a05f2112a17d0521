"""ASCEND_RT_VISIBLE_DEVICES: how it is written for a process, and what a user's own value means.

torch_npu reads it strictly: digits and commas, ascending, nothing else. ``6,4``, ``1,1`` and ``,0`` show it no device,
``0, 1`` and ``0-3`` only device 0, without a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from hetero_llm.plugin import Device

VARIABLE = "ASCEND_RT_VISIBLE_DEVICES"
NONE_AT_ALL = ("", "NoDevFiles")


def value(devices: Iterable[Device]) -> str:
    """Return the value that makes exactly `devices` visible: logical numbers, ascending, each once."""
    return ",".join(str(index) for index in sorted({device.index for device in devices}))


def allowed(environ: Mapping[str, str]) -> frozenset[int] | None:
    """Return the logical numbers the user's own value allows, None without one.

    The order does not matter here: each engine gets its own value, ascending.

    Raises:
        ValueError: the value is not a list of numbers; the text says what is wrong.
    """
    text = environ.get(VARIABLE)
    if text is None:
        return None
    if text in NONE_AT_ALL:
        return frozenset()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(
            f"{VARIABLE}={text!r} is not a list of numbers such as 0,1,4: the runtime stops reading at once"
        )
    return frozenset(int(part) for part in text.split(","))


def complaint(text: str) -> str | None:
    """Return why torch_npu would see fewer devices than `text` names, None when it is well written."""
    try:
        allowed({VARIABLE: text})
    except ValueError as error:
        return str(error)
    numbers = [int(part) for part in text.split(",")] if text not in NONE_AT_ALL else []
    if any(later <= earlier for earlier, later in pairwise(numbers)):
        return f"{VARIABLE}={text!r} is not ascending: torch_npu sees no device at all"
    return None
