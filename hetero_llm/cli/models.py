"""``hetero-llm models``: what can be served from this machine."""

from __future__ import annotations

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option
from hetero_llm.model import to_data


@click.group(cls=RichGroup)
def command() -> None:
    """List, show or remove local models."""


@command.command("list", cls=Verb)
@output_option
def list_command(output: render.Format) -> int:
    """List the models that can be named here: bundled ones and downloads. Any folder with a model can be served too."""
    from hetero_llm.models.store import list_models

    models = list_models()
    columns = ("model", "origin", "parameters", "weights", "on disk", "available", "description")
    rows = tuple(
        (
            item.name,
            item.origin,
            f"{item.facts.parameters / 1e6:.0f} M",
            render.size(item.facts.weights_bytes),
            render.size(item.disk_bytes),
            item.available,
            item.description,
        )
        for item in models
    )
    render.show(output, {"models": to_data(models)}, render.Table(columns, rows, empty="no local models"))
    return 0


@command.command("show", cls=Verb)
@click.argument("model")
@output_option
def show_command(model: str, output: render.Format) -> int:
    """Show what a model's files say about it. MODEL is an alias, a folder or a downloaded hub id."""
    from hetero_llm.models.store import show

    data = to_data(show(model))
    flat = {**{name: value for name, value in data.items() if name != "facts"}, **data["facts"]}
    rows = tuple((name.replace("_", " "), _shown(name, value)) for name, value in flat.items())
    render.show(output, data, render.Table(("what", "value"), rows))
    return 0


def _shown(name: str, value: object) -> object:
    return f"{render.size(value)} ({value})" if name.endswith("_bytes") and isinstance(value, int) else value


@command.command("rm", cls=Verb)
@click.argument("model")
def remove_command(model: str) -> int:
    """Remove what the cache holds of a bundled model. Folders and downloads are yours and are not touched."""
    from hetero_llm.models.store import remove

    freed_bytes = remove(model)
    render.say(f"{model}: {render.size(freed_bytes)} freed" if freed_bytes else f"{model}: nothing was cached")
    return 0
