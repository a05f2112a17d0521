"""Fake hardware by environment variable, for planning machines one does not have and for tests.

``HETERO_LLM_OVERRIDE_CUDA="count=2,type=H100-80GB,memory=80GiB"`` makes this machine appear to have two of them. To
plan on them the kind needs no plugin. With ``engine=sim`` they can be served too: the kind's own plugin does its part,
and the engine of the kind `sim` stands in for its real one. Such devices are marked `simulated` everywhere they are
shown.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping

from hetero_llm.errors import OverrideInvalid
from hetero_llm.matrix import load_matrix
from hetero_llm.model import Device, Health
from hetero_llm.plugin import Discovery

PREFIX = "HETERO_LLM_OVERRIDE_"
NODE_NAME_ENV = "HETERO_LLM_NODE_NAME"
"""Name of this machine as a node; default: its host name. Uids of pretended devices are made from it."""
_KEYS = ("count", "type", "memory", "free", "engine")
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_EXAMPLE = "count=2,type=H100-80GB,memory=80GiB"
_MAX_DEVICES = 4096
_UID = "simulated-"


def overridden_kinds(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the kinds that have an override, ascending. An empty variable is no override."""
    return tuple(sorted(name[len(PREFIX) :].lower() for name, text in environ.items() if _is_override(name, text)))


def _is_override(name: str, text: str) -> bool:
    return name.startswith(PREFIX) and len(name) > len(PREFIX) and bool(text.strip())


def override(kind: str, environ: Mapping[str, str] = os.environ) -> Discovery | None:
    """Return the devices the variable of `kind` asks for, or None without one.

    ``memory`` may be left out when the hardware matrix knows the type; ``free`` defaults to ``memory``;
    ``count=0`` says that the machine has none; ``engine`` names the kind whose engine stands in for the real one.

    Raises:
        OverrideInvalid: a key is unknown or twice, ``count`` or ``type`` is missing, or a value cannot be read.
    """
    variable = PREFIX + kind.upper()
    text = environ.get(variable, "").strip()
    if not text:
        return None
    fields = _fields(variable, text)
    count = _count(variable, fields)
    accelerator = _accelerator(variable, fields, needed=count > 0)
    memory_bytes = _bytes(variable, "memory", fields)
    if memory_bytes is None:
        known = load_matrix().find(kind, accelerator)
        memory_bytes = known.memory_bytes if known else None
    free_bytes = _bytes(variable, "free", fields)
    free_bytes = memory_bytes if free_bytes is None else free_bytes
    _check_engine(variable, fields)
    name = node_name(environ)
    devices = (
        Device(
            kind=kind,
            accelerator=accelerator,
            uid=f"{_UID}{name}-{kind}-{index}",
            index=index,
            memory_bytes=memory_bytes,
            free_bytes=free_bytes,
            health=Health.OK,
            simulated=True,
            stand_in=fields.get("engine"),
        )
        for index in range(count)
    )
    return Discovery(devices=tuple(devices), source=variable)


def node_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this machine as a node."""
    return environ.get(NODE_NAME_ENV, "").strip() or socket.gethostname()


def pretended_only(device: Device) -> bool:
    """Return whether an override made this device and named no engine: it can be planned on, not served."""
    return device.uid.startswith(_UID) and device.stand_in is None


def _fields(variable: str, text: str) -> dict[str, str]:
    fields: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in _KEYS or not equals:
            close = difflib.get_close_matches(key, _KEYS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise _invalid(variable, f"{part.strip()!r} is not one of {', '.join(_KEYS)} with a value{hint}")
        if key in fields:
            raise _invalid(variable, f"{key!r} is given twice")
        fields[key] = value
    return fields


def _count(variable: str, fields: Mapping[str, str]) -> int:
    text = fields.get("count", "")
    if not re.fullmatch(r"[0-9]+", text) or int(text) > _MAX_DEVICES:
        raise _invalid(variable, f"'count' must be a whole number from 0 to {_MAX_DEVICES}, not {text!r}")
    return int(text)


def _accelerator(variable: str, fields: Mapping[str, str], *, needed: bool) -> str:
    name = fields.get("type", "")
    if (needed or name) and not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name):
        raise _invalid(variable, f"'type' must be 1 to 63 of A-Z a-z 0-9 . _ -, not {name!r}")
    return name


def _check_engine(variable: str, fields: Mapping[str, str]) -> None:
    name = fields.get("engine")
    if name is not None and not re.fullmatch(r"[a-z][a-z0-9]*", name):
        raise _invalid(variable, f"'engine' must be a kind such as sim, not {name!r}")


def _bytes(variable: str, key: str, fields: Mapping[str, str]) -> int | None:
    """Return a size such as ``80GiB`` or ``512 MB`` in bytes, None when `key` is not given."""
    if key not in fields:
        return None
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", fields[key])
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise _invalid(variable, f"{key!r} must be a size such as 80GiB, not {fields[key]!r}")
    return int(float(match[1]) * unit)


def _invalid(variable: str, cause: str) -> OverrideInvalid:
    return OverrideInvalid(f"cannot read {variable}", cause=cause, next=(f'{variable}="{_EXAMPLE}"',))
