"""YAML text to plain values that remember where they stand, so that every complaint names file, line and column."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hetero_llm.errors import ConfigInvalid, ConfigUnreadable

KeyPath = tuple[str | int, ...]
"""Way to a value: mapping keys and list positions from the root, ``("models", 0, "name")``."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed file.

    Attributes:
        path: where it was read from.
        values: its content as builtins.
        places: line and column of each key (for mapping entries) or item, both from 1.
    """

    path: Path
    values: Mapping[str, Any]
    places: Mapping[KeyPath, tuple[int, int]] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """Return ``file:line:col`` of the nearest enclosing thing that has a place."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                row, column = self.places[path[:length]]
                return f"{self.path}:{row}:{column}"
        return str(self.path)


def read_config_file(path: Path) -> ConfigFile:
    """Read a YAML mapping.

    Raises:
        ConfigUnreadable: no such file, no permission, not UTF-8, or not YAML.
        ConfigInvalid: the top level is no mapping, or a key stands twice.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        places: dict[KeyPath, tuple[int, int]] = {}
        values = _value(root, (), places, path) if root is not None else {}
    except OSError as error:
        raise ConfigUnreadable(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigUnreadable(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except yaml.YAMLError as error:
        raise ConfigUnreadable(f"{_mark(path, error)}: not YAML: {_problem(error)}") from error
    except RecursionError as error:
        raise ConfigUnreadable(f"{path}: nested too deeply, or an alias that stands for itself") from error
    if not isinstance(values, dict):
        raise ConfigInvalid(f"{path}:1:1: the top level must be a mapping, not a {type(values).__name__}")
    return ConfigFile(path, values, places)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the nearest of `known`, or an empty string."""
    near = difflib.get_close_matches(str(word), list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _value(node: yaml.Node, path: KeyPath, places: dict[KeyPath, tuple[int, int]], file: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, path, places, file)
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            places[(*path, position)] = _at(item)
        return [_value(item, (*path, position), places, file) for position, item in enumerate(node.value)]
    try:
        return _scalar(node)
    except ValueError as error:  # it looks like a date, say, and is none
        row, column = _at(node)
        raise ConfigInvalid(
            f"{file}:{row}:{column}: {node.value!r} cannot be read", cause=str(error), next=("put it in quotes",)
        ) from error


def _mapping(
    node: yaml.MappingNode, path: KeyPath, places: dict[KeyPath, tuple[int, int]], file: Path
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        row, column = _at(key_node)
        key = str(key_node.value)
        if key in result:
            raise ConfigInvalid(f"{file}:{row}:{column}: key {key!r} stands twice in the same place")
        places[(*path, key)] = (row, column)
        result[key] = _value(value_node, (*path, key), places, file)
    return result


def _scalar(node: yaml.Node) -> Any:
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _at(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _mark(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f"{path}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(path)


def _problem(error: yaml.YAMLError) -> str:
    return getattr(error, "problem", None) or str(error).splitlines()[0]
