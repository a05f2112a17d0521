"""The units in deploy/systemd call commands that exist, with flags they take."""

import re
import shlex
from pathlib import Path

import click
import pytest

from hetero_llm.cli.group import cli

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"


def command_of(unit):
    (line,) = re.findall(r"^ExecStart=(.*)$", (UNITS / unit).read_text(), re.MULTILINE)
    return shlex.split(line.replace("${HETERO_LLM_HEAD}", "10.0.0.1:6379"))


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_a_unit_starts_a_command_that_exists(unit):
    program, *words = command_of(unit)
    assert program.endswith("/hetero-llm")
    command, ctx = cli, click.Context(cli, info_name="hetero-llm")
    while isinstance(command, click.Group):
        name, command, words = command.resolve_command(ctx, words)
        ctx = click.Context(command, info_name=name, parent=ctx)
    command.make_context(name, words, parent=ctx.parent)


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_a_unit_takes_the_exit_code_of_sigterm_for_success(unit):
    assert "SuccessExitStatus=130" in (UNITS / unit).read_text()
