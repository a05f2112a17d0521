"""``hetero-llm logs``: a replica's engine log."""

from __future__ import annotations

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option


@click.command(cls=Verb)
@click.argument("replica")
@click.option("-n", "--tail", type=click.IntRange(min=1), metavar="LINES", help="Only the last lines.")
@address_option
def command(replica: str, tail: int | None, address: str | None) -> int:
    """Print the engine log of a replica. REPLICA is its id or the beginning of it; `status` lists them."""
    from hetero_llm.cluster.session import connect

    session = connect(address)  # before Ray is imported: with nothing running the answer comes at once
    from hetero_llm.cluster.deploy import replica_log

    try:
        for text in replica_log(session, replica, tail):
            render.line(text.rstrip("\n"))
    finally:
        session.close()
    return 0
