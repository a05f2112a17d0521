"""``hetero-llm drain``: move every replica off a node, so that it can be switched off."""

from __future__ import annotations

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option
from hetero_llm.errors import ExitCode


@click.command(cls=Verb)
@click.argument("node")
@click.option("--force", is_flag=True, help="Drain although some replicas have no other place; those stay.")
@address_option
def command(node: str, force: bool, address: str | None) -> int:
    """Move every replica off NODE without losing a request.

    For each one a successor on another node is ready before it leaves, and it finishes what it answers. Nothing new is
    placed on NODE; to use it again, end it and let it join anew.
    """
    from hetero_llm.cluster.session import connect

    session = connect(address)
    from hetero_llm.cluster.drain import drain

    try:
        left = drain(session, node, force=force, progress=render.say)
    finally:
        session.close()
    if left:
        render.say(f"{node} takes nothing new, but these have no other place and stay: {', '.join(left)}")
        return ExitCode.FAILURE
    render.say(f"{node} is drained")
    return ExitCode.OK
