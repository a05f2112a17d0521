"""Do the versions on a node go together, as far as the hardware matrix knows? What it does not list is not refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetero_llm.matrix import VersionSet


def version_conflict(sets: Sequence[VersionSet], found: Mapping[str, str | None]) -> str | None:
    """Return why a node with the versions `found` cannot work, with both numbers; None when nothing speaks against it.

    Two things speak against it: a plugin that is bound to the vLLM of the same number stands beside another one, and
    the toolkit is of another major version than any that this vLLM was seen with. Smaller differences are no proof of
    failure, and a vLLM that no set lists is taken as it is; `doctor` tells about both.
    """
    return _plugin_conflict(sets, found) or _toolkit_conflict(sets, found)


def _plugin_conflict(sets: Sequence[VersionSet], found: Mapping[str, str | None]) -> str | None:
    """A plugin that follows vLLM's numbers in every set of the matrix must do so on the node."""
    plugin, vllm = found.get("plugin"), found.get("vllm")
    pairs = [(known.plugin, known.vllm) for known in sets if known.plugin and known.vllm]
    bound = bool(pairs) and all(_series(one) == _series(other) for one, other in pairs)
    if not bound or plugin is None or vllm is None or _series(plugin) == _series(vllm):
        return None
    return f"the plugin {plugin} needs vLLM {'.'.join(_series(plugin))}.x, the node has vLLM {vllm}"


def _toolkit_conflict(sets: Sequence[VersionSet], found: Mapping[str, str | None]) -> str | None:
    vllm, toolkit = found.get("vllm"), found.get("toolkit")
    if vllm is None or toolkit is None:
        return None
    known = [one.toolkit for one in sets if one.toolkit and one.vllm and _series(one.vllm) == _series(vllm)]
    if not known or any(_series(one)[:1] == _series(toolkit)[:1] for one in known):
        return None
    return f"vLLM {vllm} needs toolkit {' or '.join(sorted(set(known)))}, the node has {toolkit}"


def _series(version: str) -> tuple[str, ...]:
    """Return major and minor number; a build tag does not count."""
    return tuple(version.partition("+")[0].split(".")[:2])
