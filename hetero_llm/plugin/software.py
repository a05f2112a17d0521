"""What is installed in this Python environment, read from the metadata of distributions: nothing is imported."""

from __future__ import annotations

from importlib import metadata

PLATFORM_PLUGINS = "vllm.platform_plugins"
"""Entry-point group of vLLM's out-of-tree platforms. vLLM loads one; with two it refuses to start."""


def installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, None when it is not there."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def platform_plugins() -> tuple[metadata.EntryPoint, ...]:
    """Return vLLM's out-of-tree platform plugins in this Python environment, by name."""
    return tuple(sorted(metadata.entry_points(group=PLATFORM_PLUGINS), key=lambda entry: entry.name))
