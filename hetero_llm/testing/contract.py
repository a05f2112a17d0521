"""The whole contract as one class to inherit from, and the guard that keeps its tests as they are."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_llm.testing.base import HOOKS, SETTINGS
from hetero_llm.testing.level0_discovery import DiscoveryContract
from hetero_llm.testing.level0_engine import EngineContract
from hetero_llm.testing.level0_group import GroupContract
from hetero_llm.testing.level0_model import ModelContract
from hetero_llm.testing.level0_plugin import PluginContract
from hetero_llm.testing.level1_fakes import FakesContract
from hetero_llm.testing.level2_real import RealContract

_KIT = "hetero_llm.testing."
_EXCUSES = ("skip", "skipif", "xfail")


class BackendContract(
    PluginContract,
    DiscoveryContract,
    GroupContract,
    EngineContract,
    ModelContract,
    FakesContract,
    RealContract,
):
    """All contract tests. Inherit from it, name the `backend`, and give the hooks you can (see `Contract`).

    A plugin may add tests of its own; one that replaces, skips or excuses a test of the contract is no test class at
    all: defining it raises TypeError.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        ours = _names_of_the_kit()
        for source in cls.__mro__:
            if not source.__module__.startswith(_KIT) and source is not object:
                _refuse_replaced(cls, source, ours)
                _refuse_excuses(cls, source)


def _names_of_the_kit() -> frozenset[str]:
    names = {name for part in BackendContract.__mro__ if part is not object for name in vars(part)}
    settable = {*SETTINGS, *HOOKS}
    # What Python itself puts into every class is nobody's.
    return frozenset(name for name in names - settable if not name.startswith("__"))


def _refuse_replaced(cls: type, source: type, ours: frozenset[str]) -> None:
    for name in vars(source):
        if name in ours:
            through = "" if source is cls else f" through {source.__name__}"
            what = "test" if name.startswith("test_") else "part"
            raise TypeError(
                f"{cls.__name__} overrides {name}{through}: a {what} of the contract is not a plugin's to change. "
                f"Settable are {', '.join((*SETTINGS, *HOOKS))}."
            )


def _refuse_excuses(cls: type, source: type) -> None:
    marks = vars(source).get("pytestmark", ())
    for mark in marks if isinstance(marks, list | tuple) else (marks,):
        if isinstance(mark, pytest.MarkDecorator | pytest.Mark) and mark.name in _EXCUSES:
            raise TypeError(
                f"{cls.__name__} is marked {mark.name}: that would excuse the plugin from the whole contract. "
                "Declare what it lacks in its backend instead: forms_groups, spans_nodes."
            )
