"""The doctor's checks of installed engines: vLLM plugins that exclude each other, versions that must be equal."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from hetero_llm.plugin import Check
from hetero_llm.plugin.software import PLATFORM_PLUGINS, installed

GENERAL_GROUP = "vllm.general_plugins"
LOCKED_TO_VLLM = ("vllm-ascend",)
"""Platform plugins that patch vLLM's insides and so need vLLM of exactly their own release."""

OWN_ENVIRONMENT = "give each kind a Python environment (or image) of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlugin:
    """An entry point by which a distribution hooks into vLLM."""

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        """Return ``ascend (vllm-ascend 0.23.0)``."""
        return f"{self.name} ({self.distribution} {self.version})"


def installed_plugins(group: str) -> tuple[EnginePlugin, ...]:
    """Return the entry points of `group` in this Python environment, by name."""
    found = (
        EnginePlugin(name=entry.name, distribution=entry.dist.name, version=entry.dist.version)
        for entry in metadata.entry_points(group=group)
        if entry.dist is not None
    )
    return tuple(sorted(found, key=str))


def software_checks() -> tuple[Check, ...]:
    """Run all of them in this Python environment."""
    platforms, general = installed_plugins(PLATFORM_PLUGINS), installed_plugins(GENERAL_GROUP)
    return (
        check_platform_plugins(platforms),
        check_engine_lock({name: installed(name) for name in ("vllm", *LOCKED_TO_VLLM)}),
        check_plugin_filter(os.environ.get("VLLM_PLUGINS"), platforms, general),
    )


def check_platform_plugins(plugins: Sequence[EnginePlugin]) -> Check:
    """Return whether at most one distribution makes vLLM run on its platform: with two, vLLM ends with an error."""
    text = ", ".join(str(plugin) for plugin in plugins)
    if len({plugin.distribution for plugin in plugins}) <= 1:
        return Check(name="platform-plugins", ok=True, text=text or "no out-of-tree platform plugin of vLLM")
    advice = (f"pip uninstall {plugins[-1].distribution}", OWN_ENVIRONMENT)
    return Check(name="platform-plugins", ok=False, text=f"vLLM takes one platform plugin, found {text}", next=advice)


def check_engine_lock(installed: Mapping[str, str | None]) -> Check:
    """Return whether vLLM is of the release its platform plugin was made for.

    Args:
        installed: version by distribution, None where it is not installed; has `vllm`.
    """
    plugins = [(name, version) for name in LOCKED_TO_VLLM if (version := installed.get(name)) is not None]
    if not plugins:
        return Check(name="engine-lock", ok=True, text="no platform plugin that is bound to a release of vLLM")
    vllm = installed.get("vllm")
    for name, version in plugins:
        wanted = release(version)
        if vllm is None or release(vllm) != wanted:
            text = f"{name} {version} needs vllm {wanted} exactly, found {vllm or 'none'}"
            advice = (f"pip install vllm=={wanted}", f"start from the image of {name} {version}")
            return Check(name="engine-lock", ok=False, text=text, next=advice)
    return Check(name="engine-lock", ok=True, text=", ".join(f"{name} {v} with vllm {vllm}" for name, v in plugins))


def check_plugin_filter(
    allowed: str | None, platforms: Sequence[EnginePlugin], general: Sequence[EnginePlugin]
) -> Check:
    """Return whether ``VLLM_PLUGINS`` keeps vLLM from loading a plugin that is installed.

    Without its platform plugin vLLM does not fail: it goes on as CPU.

    Args:
        allowed: value of the variable, None when it is not set.
    """
    name = "plugin-filter"
    if allowed is None:
        return Check(name=name, ok=True, text="VLLM_PLUGINS is not set: vLLM loads all its plugins")
    names = {part.strip() for part in allowed.split(",")}
    advice = ("unset VLLM_PLUGINS", f"VLLM_PLUGINS={','.join(plugin.name for plugin in (*platforms, *general))}")
    if missing := [str(plugin) for plugin in platforms if plugin.name not in names]:
        text = f"VLLM_PLUGINS={allowed} leaves out {', '.join(missing)}: vLLM would run on the CPU without a word"
        return Check(name=name, ok=False, text=text, next=advice)
    if missing := [str(plugin) for plugin in general if plugin.name not in names]:
        text = f"VLLM_PLUGINS={allowed} leaves out {', '.join(missing)}"
        return Check(name=name, ok=None, text=text, next=advice)
    return Check(name=name, ok=True, text=f"VLLM_PLUGINS={allowed} names all installed plugins")


def release(version: str) -> str:
    """Return the release of a PEP 440 version: ``0.23.0`` of ``0.23.0rc1``, ``0.23.0.post1`` and ``0.23.0+cpu``."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    return match[1] if match else version
