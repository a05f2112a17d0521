"""The sources of configuration as layers: values by path, each with the place it came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hetero_llm.config_file import ConfigFile, KeyPath
from hetero_llm.errors import ConfigInvalid

ENV_PREFIX = "HETERO_LLM_"


@dataclass(frozen=True, slots=True)
class Layer:
    """Values of one source; `origin` says where a path came from."""

    values: Mapping[KeyPath, Any]
    origins: Mapping[KeyPath, str]


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield every value of a tree of mappings and lists with its path; an empty container is a value too."""
    children: Sequence[tuple[str | int, Any]] = ()
    if isinstance(value, Mapping):
        children = tuple(value.items())
    elif isinstance(value, list | tuple):
        children = tuple(enumerate(value))
    if not children:
        yield path, value
    for key, child in children:
        yield from leaves(child, (*path, key))


def dotted(path: KeyPath) -> str:
    """Return ``models[0].name`` for ``("models", 0, "name")``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def file_layer(file: ConfigFile | None) -> Layer:
    """Return what the file says; an empty layer without one."""
    if file is None:
        return Layer({}, {})
    # Whole top-level values: lists must stay lists. Sections are split so that other layers can fill in.
    values: dict[KeyPath, Any] = {}
    for key, value in _from_file_folder(file).items():
        split = isinstance(value, dict) and value
        values.update({(key, name): inner for name, inner in value.items()} if split else {(key,): value})
    return Layer(values, {path: file.place(path) for path in file.places})


def _from_file_folder(file: ConfigFile) -> dict[str, Any]:
    """Return the values with relative paths taken from the file's folder, as its author meant them."""
    values = dict(file.values)
    gateway, models = values.get("gateway"), values.get("models")
    if isinstance(gateway, dict) and isinstance(gateway.get("api_keys_file"), str):
        values["gateway"] = gateway | {"api_keys_file": str(file.path.parent / gateway["api_keys_file"])}
    if isinstance(models, list):
        values["models"] = [_rebased(model, file.path.parent) for model in models]
    return values


def _rebased(model: Any, folder: Path) -> Any:
    # Only an explicit ./ or ../ is a path for certain: Qwen/Qwen2.5 is a hub id.
    source = model.get("source") if isinstance(model, dict) else None
    if isinstance(source, str) and source.startswith(("./", "../")):
        return model | {"source": str(folder / source)}
    return model


def env_layer(environ: Mapping[str, str]) -> Layer:
    """Return the variables with ``__`` in their name; those without belong to other parts of hetero-llm.

    Raises:
        ConfigInvalid: a value is not YAML.
    """
    names = [name for name in sorted(environ) if name.startswith(ENV_PREFIX) and "__" in name]
    paths = {name: tuple(name.removeprefix(ENV_PREFIX).lower().split("__")) for name in names}
    values: dict[KeyPath, Any] = {paths[name]: _env_value(name, environ[name]) for name in names}
    return Layer(values, {paths[name]: f"env {name}" for name in names})


def _env_value(name: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: it looks like a date, say, and is none
        raise ConfigInvalid(f"env {name}: {text!r} is not a YAML value") from error


def flag_layer(flags: Mapping[str, Any]) -> Layer:
    """Return the flags that were given, by dotted path."""
    values: dict[KeyPath, Any] = {tuple(name.split(".")): value for name, value in flags.items() if value is not None}
    return Layer(values, {path: f"flag --{str(path[-1]).replace('_', '-')}" for path in values})


def put(tree: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Set `value` at `path`, making mappings on the way."""
    for part in path[:-1]:
        inner = tree.setdefault(str(part), {})
        if not isinstance(inner, dict):
            inner = tree[str(part)] = {}
        tree = inner
    tree[str(path[-1])] = value
