"""From ``module:Class`` to a backend."""

from __future__ import annotations

import importlib

from hetero_llm.plugin import Backend


def load(target: str) -> Backend:
    """Return a new backend of the class named ``module:Class``.

    Raises:
        TypeError: it is no Backend, or the name has no colon.
    """
    module, colon, name = target.partition(":")
    if not colon:
        raise TypeError(f"{target!r} does not name a class as module:Class")
    made = getattr(importlib.import_module(module), name)()
    if not isinstance(made, Backend):
        raise TypeError(f"{target} is {type(made).__name__}, not a hetero_llm.plugin.Backend")
    return made
