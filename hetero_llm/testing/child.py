"""``python -m hetero_llm.testing.child MODULE:CLASS ANSWER WHAT [DEVICES]``: ask a backend, write what was seen.

Reports everything as data and judges nothing; the contract tests do. The answer goes to a file, so that nothing a
vendor library prints can spoil it.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from hetero_llm.model import from_data, to_data
from hetero_llm.plugin import Backend, Check, Device, DeviceUsage, Discovery, PoolWish
from hetero_llm.testing import samples
from hetero_llm.testing.libraries import ENGINE_MODULES, VENDOR_MODULES, loaded
from hetero_llm.testing.loading import load
from hetero_llm.testing.observation import Observation

_HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/ptmx")
_HARMLESS_FOLDERS = ("/dev/pts/", "/dev/shm/", "/dev/mqueue/")

T = TypeVar("T")


class Watch:
    """Notes, while it is on, shared libraries opened with ctypes and environment variables that are set or removed.

    An audit hook can't be taken out again, so there is one for the life of the process.
    """

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self.variables: set[str] = set()
        self._on = False
        sys.addaudithook(self._note)

    def __enter__(self) -> None:
        self.libraries.clear()
        self.variables.clear()
        self._on = True

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._on:
            return
        # dlopen(None) is how ctypes itself gets at the interpreter.
        if event == "ctypes.dlopen" and args[0] is not None:
            self.libraries.add(str(args[0]))
        elif event in ("os.putenv", "os.unsetenv"):
            self.variables.add(os.fsdecode(args[0]))


class Asker:
    """Asks one backend and keeps the traceback of what fails."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def ask(self, what: str, question: Callable[[], T]) -> T | None:
        """Return the answer, or None and the traceback under `what`."""
        try:
            return question()
        # Foreign code: whatever it raises, exits with included, is the finding.
        except (Exception, SystemExit):  # noqa: BLE001
            self.errors[what] = traceback.format_exc()
            return None


def main(target: str, what: str, devices: Path | None) -> Observation:
    """Ask `target` for its devices (``discover``), for ``everything``, or for the ``commands`` on `devices`."""
    asker, watch = Asker(), Watch()
    modules = set(sys.modules)
    with watch:
        backend = asker.ask("import", lambda: load(target))
    seen = Observation(
        import_modules=loaded(VENDOR_MODULES, set(sys.modules) - modules),
        import_libraries=tuple(sorted(watch.libraries)),
        import_variables=tuple(sorted(watch.variables)),
    )
    if backend is not None and devices is not None:
        held = from_data(msgspec.json.decode(devices.read_bytes()), tuple[Device, ...])
        with watch:
            asker.ask("commands", lambda: _commands(backend, held))
        seen = replace(seen, command_variables=tuple(sorted(watch.variables)))
    elif backend is not None:
        seen = _asked(asker, backend, seen, what == "everything")
    new = set(sys.modules) - modules
    return replace(seen, errors=asker.errors, modules=loaded(ENGINE_MODULES, new), open_devices=_open_devices())


def _commands(backend: Backend, devices: tuple[Device, ...]) -> None:
    backend.device_env(devices)
    backend.group(samples.group_spec(devices))
    backend.check_model(samples.DENSE, devices[0].accelerator, PoolWish())
    backend.engine(samples.engine_spec(devices))


def _asked(asker: Asker, backend: Backend, seen: Observation, everything: bool) -> Observation:
    started_s = time.monotonic()
    first = asker.ask("discover", lambda: _of_type(backend.discover(), Discovery))
    seen = replace(seen, discovery=first, discover_s=time.monotonic() - started_s)
    if not everything or first is None:
        return seen
    asker.ask("round trip", lambda: _round_trip(first))
    return replace(
        seen,
        again=asker.ask("discover", lambda: _of_type(backend.discover(), Discovery)),
        versions=asker.ask("versions", lambda: _mapping(backend.versions())),
        usage=asker.ask("usage", lambda: _all_of_type(backend.usage(first.devices), DeviceUsage)),
        checks=asker.ask("doctor", lambda: _all_of_type(backend.doctor(), Check)),
    )


def _mapping(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise TypeError(f"it returned {type(value).__name__}, not a mapping")
    return dict(value)


def _of_type(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it returned {type(value).__name__}, not {kind.__name__}")
    return value


def _all_of_type(values: Any, kind: type[T]) -> tuple[T, ...]:
    return tuple(_of_type(value, kind) for value in _of_type(values, tuple))


def _round_trip(discovery: Discovery) -> None:
    """Raise when `discovery` is not the same after pickling and after JSON: that is how it reaches other processes."""
    for name, copy in (
        ("pickle", pickle.loads(pickle.dumps(discovery))),
        ("JSON", from_data(msgspec.json.decode(msgspec.json.encode(to_data(discovery))), Discovery)),
    ):
        if copy != discovery:
            raise ValueError(f"after {name} it is {copy}, before it was {discovery}")


def _open_devices() -> tuple[str, ...]:
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = str(link.readlink())
        except OSError:  # the descriptor of this very listing is gone by now
            continue
        if path.startswith("/dev/") and path not in _HARMLESS_DEVICES and not path.startswith(_HARMLESS_FOLDERS):
            found.add(path)
    return tuple(sorted(found))


if __name__ == "__main__":
    target, answer, what, *devices = sys.argv[1:]
    encoded = msgspec.json.encode(to_data(main(target, what, Path(devices[0]) if devices else None)))
    # Renamed into place: a process killed while it writes has not answered.
    part = Path(f"{answer}.part")
    part.write_bytes(encoded)
    part.rename(answer)
