"""``hetero-llm doctor``: checks of this machine, each failure with its fix."""

from __future__ import annotations

import dataclasses

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option
from hetero_llm.errors import ExitCode

WORDS = {True: "ok", False: "FAILED", None: "unknown"}


@click.command(cls=Verb)
@click.argument("kinds", nargs=-1, metavar="[KIND]…")
@output_option
def command(kinds: tuple[str, ...], output: render.Format) -> int:
    """Check this machine, with a fix for each finding; of some kinds only, or of everything.

    Exit code 1 when a check failed.
    """
    from hetero_llm.cli.checks import general_checks
    from hetero_llm.plugin.manager import load_plugins

    checks = (*(() if kinds else general_checks()), *load_plugins().doctor_checks(kinds))
    rows = tuple((check.name, WORDS[check.ok], check.text, "; ".join(check.next) or None) for check in checks)
    healthy = all(check.ok is not False for check in checks)
    data = {"ok": healthy, "checks": [dataclasses.asdict(check) for check in checks]}
    render.show(output, data, render.Table(("check", "result", "seen", "next"), rows, empty="no checks"))
    return ExitCode.OK if healthy else ExitCode.FAILURE
