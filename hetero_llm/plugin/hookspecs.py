"""The pluggy hooks. pluggy collects what plugins return; nothing is dispatched through it."""

from __future__ import annotations

from collections.abc import Sequence

import click
import pluggy

from hetero_llm.plugin.backend import Backend, Check
from hetero_llm.plugin.engine import RootCausePattern

PROJECT = "hetero_llm"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def hetero_llm_backends() -> Sequence[Backend]:
    """Return the backends this plugin provides, usually one."""
    raise NotImplementedError


@hookspec
def hetero_llm_doctor_checks() -> Sequence[Check]:
    """Return checks that belong to no single backend. Runs in a subprocess with a deadline."""
    raise NotImplementedError


@hookspec
def hetero_llm_error_hints() -> Sequence[RootCausePattern]:
    """Return extra patterns that turn log lines into causes, tried after the backend's own."""
    raise NotImplementedError


@hookspec
def hetero_llm_cli_commands() -> Sequence[click.Command]:
    """Return extra verbs for the command line; a name that is taken is refused."""
    raise NotImplementedError
