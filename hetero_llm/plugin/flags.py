"""Turn engine settings from the configuration into command-line flags of the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def engine_flags(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the flags of `options`, in their order.

    ``{"max_num_seqs": 8, "additional_config": {"a": 1}, "enable_prefix_caching": False}`` becomes
    ``--max-num-seqs 8 --additional-config {"a": 1} --no-enable-prefix-caching``. None is left out; a list becomes
    several words after its flag.
    """
    return tuple(word for name, value in options.items() for word in _flag(name.replace("_", "-"), value))


def _flag(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, bool):
        return (f"--{name}",) if value else (f"--no-{name}",)
    if isinstance(value, Mapping):
        return (f"--{name}", json.dumps(value))
    if isinstance(value, list | tuple):
        return (f"--{name}", *(str(item) for item in value))
    return (f"--{name}", str(value))
