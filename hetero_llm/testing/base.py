"""What a plugin's test class may give to the contract: settings and hooks. Nothing else is its to set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar

import pytest

from hetero_llm.plugin import Backend, Device
from hetero_llm.testing import samples
from hetero_llm.testing.levels import level_of, selected_level
from hetero_llm.testing.loading import load
from hetero_llm.testing.observation import Observation, observe


class Contract:
    """Settings and hooks of one plugin's contract. What a kind lacks its `Backend` declares, and is not asked for.

    Class attributes:
        backend: ``module:Class`` of the backend.
        engine_args: flags the engine of level 2 needs besides those of the backend.
    """

    backend: ClassVar[str]
    engine_args: ClassVar[tuple[str, ...]] = ()

    def sample_devices(self, count: int) -> tuple[Device, ...]:
        """Return `count` healthy devices of one node, ascending by index, as `discover` would.

        Replace it when your devices carry more than a number: links, a uid that is passed to the runtime.
        """
        found = self.observed().discovery
        like = found.devices[0] if found and found.devices else None
        return samples.devices(self.plugin().kind, count, like)

    def fake_devices(self, faulty: int | None = None) -> AbstractContextManager[Sequence[Device]]:
        """Put a fake of the driver in place while entered, and give the devices `discover` must then return.

        There are at least two. With `faulty`, the device at that place of the list cannot be read or is reported
        broken; the list given is the same, as if it were well.
        """
        raise NotImplementedError

    def fake_hang(self) -> AbstractContextManager[None]:
        """Let the driver or its tool hang while entered. It must reach a child process: by PATH, a variable, a file."""
        raise NotImplementedError

    def fake_wrong_engine(self) -> AbstractContextManager[tuple[str, str]]:
        """Let an engine of another version be installed while entered; give that version and the one needed."""
        raise NotImplementedError

    def open_contexts(self) -> int:
        """Return how many handles, sessions or contexts of the fake driver are open. Asked after each discovery."""
        raise NotImplementedError

    def tiny_model(self, folder: Path) -> Path:
        """Return a model folder the engine of level 2 serves, made inside `folder`.

        Default: the folder named by ``HETERO_LLM_CONTRACT_MODEL``, else a tiny random Qwen2, which takes torch and
        transformers in this environment.
        """
        from hetero_llm.testing.tiny_model import make_in_child

        return make_in_child(folder)

    def plugin(self) -> Backend:
        """Return a new backend."""
        return load(self.backend)

    def observed(self) -> Observation:
        """Return what a process of its own saw of the backend on this machine, without fakes."""
        return observe(self.backend)

    def need_capability(self, name: str) -> None:
        """Skip the running test when the backend declares that it lacks `name` (``forms_groups``)."""
        if not getattr(self.plugin(), name):
            pytest.skip(f"{self.plugin().kind} declares {name} = False")

    def gives(self, hook: str) -> bool:
        """Return whether the test class gives the hook of this name."""
        return getattr(type(self), hook) is not getattr(Contract, hook)

    def need(self, hook: str, what: str) -> None:
        """Skip the running test unless the class gives `hook`; the reason names it."""
        if not self.gives(hook):
            pytest.skip(f"{type(self).__name__} gives no {hook}(): {what} is not checked")

    @pytest.fixture(autouse=True)
    def _only_the_levels_asked_for(self, request: pytest.FixtureRequest) -> None:
        level, selected = level_of(getattr(request, "function", None)), selected_level(request.config)
        if level > selected:
            pytest.skip(f"level {level} was not asked for (running up to {selected})")


SETTINGS = ("backend", "engine_args")
HOOKS = ("sample_devices", "fake_devices", "fake_hang", "fake_wrong_engine", "open_contexts", "tiny_model")
