"""``hetero-llm explain``: what an error code means."""

from __future__ import annotations

import difflib
import inspect

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option
from hetero_llm.errors import HeteroError, UsageError, all_codes, error_class


@click.command(cls=Verb)
@click.argument("code", required=False, metavar="[HLnnn]")
@output_option
def command(code: str | None, output: render.Format) -> int:
    """Explain an error code, or list all of them."""
    chosen = [_find(code)] if code is not None else [_find(each) for each in all_codes()]
    rows = tuple((each.code, each.__name__, int(each.exit_code), _text(each)) for each in chosen)
    data = [
        {"code": each.code, "name": each.__name__, "exit_code": int(each.exit_code), "text": _text(each)}
        for each in chosen
    ]
    table = render.Table(("code", "name", "exit", "meaning"), rows)
    render.show(output, data if code is None else data[0], table)
    return 0


def _find(code: str) -> type[HeteroError]:
    wanted = code.upper()
    found = error_class(wanted if wanted.startswith("HL") else f"HL{wanted}")
    if found is None:
        near = difflib.get_close_matches(wanted, all_codes(), n=3)
        steps = (*(f"hetero-llm explain {each}" for each in near), "hetero-llm explain")
        raise UsageError(f"{code!r} is not an error code", next=steps)
    return found


def _text(error: type[HeteroError]) -> str:
    return " ".join((inspect.getdoc(error) or "").replace("``", "`").split())
