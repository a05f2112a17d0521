"""``hetero-llm config``: what the configuration is, where each value comes from, and what it may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, file_option, output_option

if TYPE_CHECKING:
    from hetero_llm.config import Loaded


@click.group(cls=RichGroup)
def command() -> None:
    """Show, check or describe the configuration."""


@command.command("show", cls=Verb)
@file_option
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@output_option
def show_command(config_path: str | None, origin: bool, output: render.Format) -> int:
    """Show the configuration that holds: file, environment and defaults together."""
    from hetero_llm.config_layers import dotted, leaves

    loaded = _load(config_path)
    values = loaded.config.model_dump(mode="json")
    flat = {dotted(path): value for path, value in leaves(values)}
    columns = ("key", "value", "origin") if origin else ("key", "value")
    rows = tuple((key, value, loaded.origins[key])[: len(columns)] for key, value in flat.items())
    data = {"config": values, "origins": dict(loaded.origins)} if origin else {"config": values}
    render.show(output, data, render.Table(columns, rows))
    return 0


@command.command("check", cls=Verb)
@file_option
@output_option
def check_command(config_path: str | None, output: render.Format) -> int:
    """Check a configuration file; exit code 2 with file, line and column when something is wrong."""
    from hetero_llm.cli.requests import unsupported_notes

    loaded = _load(config_path)
    notes = unsupported_notes(loaded.config)
    for note in notes:
        render.say(f"note: {note}")
    models = len(loaded.config.models)
    data = {"ok": True, "file": config_path, "models": models, "notes": notes}
    render.show(output, data, render.Table(("file", "models", "result"), ((config_path, models, "ok"),)))
    return 0


@command.command("schema", cls=Verb)
def schema_command() -> int:
    """Print the JSON Schema of hetero-llm.yaml, for editors."""
    from hetero_llm.config import json_schema

    render.line(json.dumps(json_schema(), indent=2))
    return 0


def _load(config_path: str | None) -> Loaded:
    from hetero_llm.config import load_config

    return load_config(Path(config_path) if config_path else None)
