"""Find the installed plugins, load each on its own, and keep a record of how that went.

pluggy validates and collects; nothing is dispatched through it. One broken plugin never hides another, and two that
claim one kind are both refused, by name: choosing silently between them would put a model on the wrong driver.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

import click
import pluggy

from hetero_llm.errors import UnknownKind
from hetero_llm.plugin import hookspecs
from hetero_llm.plugin.backend import API_VERSION, Backend, Check
from hetero_llm.plugin.engine import RootCausePattern

ENTRY_POINT_GROUP = "hetero_llm.backends"
DISABLE_ENV = "HETERO_LLM_DISABLE_PLUGINS"
_KIND = re.compile(r"[a-z][a-z0-9]*")

PluginStatus = Literal["loaded", "disabled", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRecord:
    """What became of one entry point.

    Attributes:
        name: name of the entry point.
        kind: kind of the backend it provides; None when it provides none or did not get that far.
        distribution: installed distribution the entry point belongs to.
        version: version of that distribution.
        api_version: plugin API the backend was written for.
        reason: why it is disabled or failed, in one line; None when loaded.
    """

    name: str
    kind: str | None = None
    distribution: str | None = None
    version: str | None = None
    api_version: str | None = None
    status: PluginStatus = "loaded"
    reason: str | None = None


class PluginManager:
    """The loaded plugins: their backends by kind, and everything else they contribute."""

    def __init__(self, records: Sequence[PluginRecord], backends: Mapping[str, Backend], plugins: _Collected) -> None:
        self._records = tuple(records)
        self._backends = dict(sorted(backends.items()))
        self._plugins = plugins

    def records(self) -> tuple[PluginRecord, ...]:
        """Return one record per entry point (per backend where one gives several), in order of name."""
        return self._records

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds that can be used, ascending."""
        return tuple(self._backends)

    def backends(self) -> tuple[Backend, ...]:
        """Return the usable backends, ascending by kind."""
        return tuple(self._backends.values())

    def backend(self, kind: str) -> Backend:
        """Return the backend of `kind`.

        Raises:
            UnknownKind: no usable plugin provides it; the cause says why one that would provide it is not used.
        """
        if kind in self._backends:
            return self._backends[kind]
        refused = [record for record in self._records if kind in (record.kind, record.name) and record.reason]
        close = difflib.get_close_matches(kind, self._backends, n=1)
        raise UnknownKind(
            f"no plugin provides the kind {kind!r}; available: {', '.join(self._backends) or 'none'}",
            cause="; ".join(f"plugin {record.name}: {record.reason}" for record in refused) or None,
            next=(*(f"did you mean {name!r}?" for name in close), "hetero-llm plugins list"),
        )

    def failed_plugin_checks(self) -> tuple[Check, ...]:
        """Return one failing doctor check per plugin that could not be used."""
        return tuple(_failed_plugin_check(record) for record in self._records if record.status == "failed")

    def checking_plugins(self) -> tuple[str, ...]:
        """Return the plugins, as ``distribution:entry point``, that have doctor checks which belong to no backend."""
        return tuple(name for name, _ in self._plugins.of("hetero_llm_doctor_checks"))

    def checks_of(self, plugin: str) -> tuple[Check, ...]:
        """Run those checks of one of `checking_plugins`. It is foreign code: it may raise anything, hang, or crash."""
        given = self._plugins.of("hetero_llm_doctor_checks")
        return tuple(check for name, checks in given if name == plugin for check in checks())

    def error_hints(self) -> tuple[RootCausePattern, ...]:
        """Return the log patterns that plugins add beyond their backends' own."""
        return tuple(hint for _, hints in self._plugins.of("hetero_llm_error_hints") for hint in hints())

    def cli_commands(self) -> tuple[click.Command, ...]:
        """Return the verbs that plugins add to the command line."""
        return tuple(verb for _, verbs in self._plugins.of("hetero_llm_cli_commands") for verb in verbs())


class _Collected:
    """The pluggy side: registers a plugin so that its hooks are validated, and returns its implementations."""

    def __init__(self) -> None:
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)

    def register(self, plugin: object, name: str) -> None:
        """Add one plugin; on an invalid hook, or none at all, it is taken out again and the error passed on."""
        try:
            self._pluggy.register(plugin, name=name)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError:
            self.drop(plugin)
            raise
        if not self._pluggy.get_hookcallers(plugin):
            self.drop(plugin)
            raise TypeError("it implements none of the hetero_llm_* hooks")

    def drop(self, plugin: object) -> None:
        """Take a plugin out; its hints, checks and verbs go with it."""
        if self._pluggy.is_registered(plugin):
            self._pluggy.unregister(plugin)

    def of(self, hook: str, plugin: object = None) -> list[tuple[str, Callable[[], Sequence[Any]]]]:
        """Return (plugin name, implementation) for `hook`, of all plugins or of one, in order of registration."""
        impls = getattr(self._pluggy.hook, hook).get_hookimpls()
        return [(impl.plugin_name, impl.function) for impl in impls if plugin is None or impl.plugin is plugin]


def load_plugins() -> PluginManager:
    """Load every plugin of the entry-point group ``hetero_llm.backends``.

    ``HETERO_LLM_DISABLE_PLUGINS`` (names, comma-separated) keeps the named ones from being imported. A plugin that
    cannot be used ends as a record with the reason; this function does not fail because of it.
    """
    disabled = {name.strip() for name in os.environ.get(DISABLE_ENV, "").split(",")}
    collected = _Collected()
    found: list[tuple[PluginRecord, Backend | None]] = []
    for entry in _sorted(entry_points(group=ENTRY_POINT_GROUP)):
        record = _record(entry)
        if entry.name in disabled:
            found.append((replace(record, status="disabled", reason=f"named in {DISABLE_ENV}"), None))
        else:
            found += _load(entry, record, collected)
    found = _refuse_shared_kinds(found)
    return PluginManager([record for record, _ in found], {b.kind: b for _, b in found if b is not None}, collected)


def _sorted(entries: Iterable[EntryPoint]) -> list[EntryPoint]:
    return sorted(entries, key=lambda entry: (entry.name, entry.dist.name if entry.dist else ""))


def _record(entry: EntryPoint) -> PluginRecord:
    dist = entry.dist
    return PluginRecord(
        name=entry.name, distribution=dist.name if dist else None, version=dist.version if dist else None
    )


def _load(entry: EntryPoint, record: PluginRecord, collected: _Collected) -> list[tuple[PluginRecord, Backend | None]]:
    """Import one plugin and return its backends; any failure of foreign code becomes a failed record."""
    plugin = None
    try:
        plugin = entry.load()
        collected.register(plugin, f"{record.distribution or ''}:{entry.name}")
        backends = [b for _, give in collected.of("hetero_llm_backends", plugin) for b in give()]
        loaded = [(_described(record, backend), backend) for backend in backends]
    # Foreign code: whatever it raises, exits with included, must not take the other plugins down.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        collected.drop(plugin)
        return [(replace(record, status="failed", reason=_one_line(error)), None)]
    return list(loaded) or [(record, None)]


def _described(record: PluginRecord, backend: object) -> PluginRecord:
    """Return the record of a backend that keeps the contract's outer shape; raises TypeError or ValueError if not."""
    if not isinstance(backend, Backend):
        raise TypeError(f"hetero_llm_backends() returned {type(backend).__name__}, not a Backend instance")
    for name in ("kind", "api_version"):
        if not isinstance(getattr(backend, name, None), str):
            raise TypeError(f"{type(backend).__name__}.{name} is not set to a string")
    if not _KIND.fullmatch(backend.kind):
        raise ValueError(f"kind {backend.kind!r} does not match [a-z][a-z0-9]*")
    if not _compatible(backend.api_version):
        raise ValueError(f"written for plugin API {backend.api_version}, this hetero-llm has {API_VERSION}")
    return replace(record, kind=backend.kind, api_version=backend.api_version)


def _compatible(wanted: str) -> bool:
    """Tell whether an API of our version serves a plugin of version `wanted`: same major, minor not above ours."""
    if not re.fullmatch(r"\d+\.\d+", wanted):
        return False
    major, minor = (int(part) for part in wanted.split("."))
    our_major, our_minor = (int(part) for part in API_VERSION.split("."))
    return major == our_major and minor <= our_minor


def _refuse_shared_kinds(
    found: Sequence[tuple[PluginRecord, Backend | None]],
) -> list[tuple[PluginRecord, Backend | None]]:
    claims: dict[str, list[str]] = {}
    for record, backend in found:
        if backend is not None:
            claims.setdefault(backend.kind, []).append(f"{record.name} ({record.distribution} {record.version})")
    result: list[tuple[PluginRecord, Backend | None]] = []
    for record, backend in found:
        if backend is not None and len(claims[backend.kind]) > 1:
            reason = f"kind {backend.kind!r} is claimed by {' and '.join(claims[backend.kind])}; none of them is used"
            result.append((replace(record, status="failed", reason=reason), None))
        else:
            result.append((record, backend))
    return result


def _failed_plugin_check(record: PluginRecord) -> Check:
    advice = f"mend or uninstall {record.distribution or record.name}, or set {DISABLE_ENV}={record.name}"
    return Check(name=f"plugin.{record.name}", ok=False, text=record.reason or "failed", next=(advice,))


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
