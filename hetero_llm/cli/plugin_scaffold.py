"""Write the folder of a new vendor plugin. The template is a whole distribution for a vendor called acme."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from hetero_llm.errors import PluginFolderExists, PluginNameRefused
from hetero_llm.plugin.manager import load_plugins

_MODEL = "acme"
_NAME = re.compile(r"[a-z][a-z0-9]{0,19}")
_EXECUTABLE = ("acme-smi.tmpl",)
_FILES = {
    "pyproject.toml": "pyproject.toml.tmpl",
    "README.md": "README.md.tmpl",
    "hetero_llm_acme/__init__.py": "init.py.tmpl",
    "hetero_llm_acme/plugin.py": "plugin.py.tmpl",
    "hetero_llm_acme/discovery.py": "discovery.py.tmpl",
    "hetero_llm_acme/group.py": "group.py.tmpl",
    "hetero_llm_acme/engine.py": "engine.py.tmpl",
    "hetero_llm_acme/checks.py": "checks.py.tmpl",
    "tests/test_contract.py": "contract.py.tmpl",
    "tests/fake/acme-smi": "acme-smi.tmpl",
}
"""Path in the new folder to template file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewPlugin:
    """What was written: the folder, its files, and the commands to go on with."""

    folder: Path
    files: tuple[Path, ...]
    next: tuple[str, ...]


def create(name: str, parent: Path) -> NewPlugin:
    """Write the distribution ``hetero-llm-NAME`` into `parent`.

    Raises:
        PluginNameRefused: `name` is not ``[a-z][a-z0-9]*`` of at most 20 letters, a Python keyword, or taken.
        PluginFolderExists: the folder is there already, or cannot be written.
    """
    _check_name(name)
    folder = parent / f"hetero-llm-{name}"
    try:
        folder.mkdir()
        files = tuple(_write(folder / _renamed(path, name), source, name) for path, source in _FILES.items())
    except FileExistsError as error:
        advice = (f"rm -r {folder}", "choose another --dir")
        raise PluginFolderExists(f"{folder} exists; nothing was written", next=advice) from error
    except OSError as error:
        raise PluginFolderExists(
            f"{folder} cannot be written", cause=error.strerror, next=("choose another --dir",)
        ) from error
    return NewPlugin(folder=folder, files=files, next=(f"cd {folder}", "pip install -e '.[test]'", "pytest"))


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        cause = (
            "it becomes a kind and part of a Python package: a lower-case letter, then letters and digits, at most 20"
        )
        raise PluginNameRefused(
            f"{name!r} cannot be the name of a plugin", cause=cause, next=("hetero-llm plugins new acme",)
        )
    advice = ("choose another name", "hetero-llm plugins list")
    for record in load_plugins().records():
        if name in (record.kind, record.name):
            owner = f"the plugin {record.name} of {record.distribution} {record.version}"
            raise PluginNameRefused(f"the name {name!r} is taken by {owner}", next=advice)
    if importlib.util.find_spec(f"hetero_llm_{name}") is not None:
        raise PluginNameRefused(f"a Python package hetero_llm_{name} is already there", next=advice)


def _write(path: Path, source: str, name: str) -> Path:
    text = resources.files("hetero_llm.plugin").joinpath("template", source).read_text(encoding="utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_renamed(text, name), encoding="utf-8")
    if source in _EXECUTABLE:
        path.chmod(0o755)
    return path


def _renamed(text: str, name: str) -> str:
    for old, new in ((_MODEL, name), (_MODEL.capitalize(), name.capitalize()), (_MODEL.upper(), name.upper())):
        text = text.replace(old, new)
    return text
