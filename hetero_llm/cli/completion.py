"""``hetero-llm completion``: the completion script of a shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from hetero_llm.cli import render
from hetero_llm.cli.group import PROGRAM, cli
from hetero_llm.cli.options import Verb

COMPLETE_ENV = "_HETERO_LLM_COMPLETE"


@click.command(cls=Verb)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> int:
    """Print the completion script of a shell.

    Try it with: source <(hetero-llm completion bash)
    """
    kind = get_completion_class(shell)
    assert kind is not None  # the choice above lists only shells click knows
    render.line(kind(cli, {}, PROGRAM, COMPLETE_ENV).source())
    return 0
