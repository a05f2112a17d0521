"""Which software is installed, read from package metadata and version files; nothing is imported.

vllm_ascend above all is never imported outside an engine: it patches vLLM as it is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from hetero_llm.plugin.software import installed, platform_plugins

ROOT = Path("/")
GENERAL_PLUGINS = "vllm.general_plugins"
_TOOLKIT_ENVS = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")
_TOOLKIT_HOMES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann", "usr/local/Ascend/cann/latest")
_VERSION_FILES = ("version.info", "version.cfg", "runtime/version.info", "share/info/runtime/version.info")
Installed = Callable[[str], str | None]


def versions(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> dict[str, str | None]:
    """Return the versions of driver, toolkit (CANN), torch, torch-npu, vllm and plugin (vllm-ascend)."""
    return {
        "driver": driver_version(root),
        "toolkit": toolkit_version(root, environ),
        "torch": installed("torch"),
        "torch-npu": installed("torch-npu"),
        "vllm": installed("vllm"),
        "plugin": installed("vllm-ascend"),
    }


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version in the file the driver's installer leaves."""
    return _stated_version(root / "usr/local/Ascend/driver/version.info")


def toolkit_home(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of the CANN toolkit: what its set_env.sh says, else where it is usually installed."""
    named = [Path(environ[name]) for name in _TOOLKIT_ENVS if environ.get(name)]
    return next((folder for folder in (*named, *(root / home for home in _TOOLKIT_HOMES)) if folder.is_dir()), None)


def toolkit_version(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return CANN's version, None when there is no toolkit or it does not say."""
    home = toolkit_home(root, environ)
    found = (_stated_version(home / name) for name in _VERSION_FILES) if home else ()
    return next((version for version in found if version), None)


def plugin_mismatch(look_up: Installed = installed) -> str | None:
    """Return why vllm-ascend and vLLM do not fit, with both versions; None when they do, or one is not installed.

    vllm-ascend X.Y.Z is made for vLLM X.Y.Z; what follows those numbers (``rc1``, ``.post1``, ``+empty``) may differ.
    """
    plugin, engine = look_up("vllm-ascend"), look_up("vllm")
    if plugin is None or engine is None or release(plugin) == release(engine):
        return None
    return f"vllm-ascend {plugin} needs vLLM {release(plugin)}, installed is vLLM {engine}"


def torch_mismatch(look_up: Installed = installed) -> str | None:
    """Return why torch-npu and torch do not fit, with both versions; None when they do, or one is not installed."""
    plugin, engine = look_up("torch-npu"), look_up("torch")
    if plugin is None or engine is None or release(plugin) == release(engine):
        return None
    return f"torch-npu {plugin} needs torch {release(plugin)}, installed is torch {engine}"


def release(version: str) -> str:
    """Return the first three numbers of a version, ``0.23.0`` for ``0.23.0rc1`` and ``v0.23.0+empty``."""
    match = re.match(r"v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", version)
    return ".".join(match.groups("0")) if match else version


def plugin_names() -> tuple[str, ...]:
    """Return the names VLLM_PLUGINS must have: our platform plugin and every general plugin.

    The variable is a filter for both groups: a plugin it does not name is not loaded. Another vendor's platform plugin
    is left out, because vLLM refuses to start with two.
    """
    ours = [entry.name for entry in platform_plugins() if entry.value.split(":")[0].split(".")[0] == "vllm_ascend"]
    general = sorted({entry.name for entry in metadata.entry_points(group=GENERAL_PLUGINS)})
    return (*(ours or ["ascend"]), *general)


def _stated_version(path: Path) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^\s*(?:package_|runtime_running_)?version\s*=\s*\[?([\w.]+)", text, re.I | re.M)
    return match[1] if match else None
