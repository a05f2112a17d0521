"""``hetero-llm plugins``: what was found in the entry-point group, and what became of it."""

from __future__ import annotations

import dataclasses

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option


@click.group(cls=RichGroup)
def command() -> None:
    """List plugins with their status and its reason."""


@command.command("list", cls=Verb)
@output_option
def list_command(output: render.Format) -> int:
    """List every plugin: its kind, distribution, API version and status, with the reason when it is not loaded."""
    from hetero_llm.plugin.manager import load_plugins

    records = load_plugins().records()
    columns = ("name", "kind", "distribution", "version", "api", "status", "reason")
    rows = tuple(
        (item.name, item.kind, item.distribution, item.version, item.api_version, item.status, item.reason)
        for item in records
    )
    table = render.Table(columns, rows, empty="no plugin is installed")
    render.show(output, {"plugins": [dataclasses.asdict(item) for item in records]}, table)
    return 0
