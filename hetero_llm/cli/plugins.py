"""``hetero-llm plugins``: what was found in the entry-point group and what became of it; check one, begin a new one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option
from hetero_llm.errors import ExitCode


@click.group(cls=RichGroup)
def command() -> None:
    """List plugins with their status and its reason, check one against the contract, begin a new one."""


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


@command.command("check", cls=Verb)
@click.argument("name")
@click.option(
    "--contract",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The plugin's own contract test file; its fakes make level 1 possible.",
)
@click.option(
    "--level",
    type=click.IntRange(0, 2),
    help="0: no hardware. 1: the fakes of --contract. 2: the real thing. Default: 1 with --contract, else 0.",
)
@output_option
def check_command(name: str, contract: Path | None, level: int | None, output: render.Format) -> int:
    """Run the contract tests on an installed plugin, named by its kind, entry point or distribution.

    Exit code 1 when one fails. Needs pytest.
    """
    from hetero_llm.cli import plugin_check
    from hetero_llm.plugin.manager import load_plugins

    manager = load_plugins()
    record = plugin_check.find_record(manager, name)
    level = level if level is not None else 1 if contract else 0
    if record.kind is None or record.status != "loaded":
        tests: tuple[plugin_check.ContractTest, ...] = (plugin_check.not_loaded(record),)
    else:
        tests = plugin_check.run_contract(manager.backend(record.kind), level, contract)
    kept = all(test.outcome != "failed" for test in tests)
    rows = tuple((test.level, test.test, _WORDS[test.outcome], test.text) for test in tests)
    data = {
        "plugin": dataclasses.asdict(record),
        "level": level,
        "ok": kept,
        "tests": [dataclasses.asdict(test) for test in tests],
    }
    render.show(output, data, render.Table(("level", "contract", "result", "why"), rows))
    return ExitCode.OK if kept else ExitCode.FAILURE


_WORDS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}


@command.command("new", cls=Verb)
@click.argument("name")
@click.option(
    "--dir",
    "parent",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=".",
    help="Folder to make the plugin's folder in. Default: this one.",
)
@output_option
def new_command(name: str, parent: Path, output: render.Format) -> int:
    """Begin a plugin for devices of kind NAME: a distribution hetero-llm-NAME that passes its contract as it is."""
    from hetero_llm.cli.plugin_scaffold import create

    made = create(name, parent)
    table = render.Table(("file",), tuple((str(path),) for path in made.files))
    render.show(output, {"folder": str(made.folder), "files": [str(path) for path in made.files]}, table)
    for step in made.next:
        render.say(f"next: {step}")
    return ExitCode.OK
