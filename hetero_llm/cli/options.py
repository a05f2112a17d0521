"""Options several verbs share, so that one flag means one thing everywhere."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import click
import rich_click
from rich_click import RichCommand

from hetero_llm.cli.render import Format

F = TypeVar("F", bound=Callable[..., Any])

ENGINE_ARGS = "hetero_llm.engine_args"
"""Key in `click.Context.meta` of the words after ``--``."""

_LABEL_WORD = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(rf"(?P<key>(?:{_LABEL_WORD}/)?{_LABEL_WORD})=(?P<value>{_LABEL_WORD})")


class Verb(RichCommand):
    """A command of ours: takes ``--debug``, which `entry.run` reads from argv."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        debug = ["--debug"]
        self.params.append(
            rich_click.RichOption(debug, is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )


class EngineVerb(Verb):
    """A command whose words after ``--`` are engine flags, even where models are listed before it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first ``--``."""
        own, engine = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
        ctx.meta[ENGINE_ARGS] = tuple(engine)
        return super().parse_args(ctx, own)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Name the engine flags in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ENGINE FLAGS]"]


def count_or_auto(text: str) -> int | str:
    """Return a whole number from 1, or ``auto``; what click calls for such an option."""
    if text == "auto":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter(f"{text!r} is not a whole number from 1, nor auto")
    return int(text)


def size_bytes(text: str) -> int:
    """Return bytes from a count with or without a unit; what click calls for such an option."""
    from hetero_llm.config import parse_size_bytes

    try:
        number = parse_size_bytes(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error
    if number < 1:
        raise click.BadParameter("must be more than 0 bytes")
    return number


def label(text: str) -> tuple[str, str]:
    """Return the two halves of ``KEY=VALUE``, as Ray takes node labels; what click calls for such an option.

    The syntax is that of Kubernetes labels, where a key may begin with a domain: ``example.org/rack=7``.
    """
    match = _LABEL.fullmatch(text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not KEY=VALUE, each of 1 to 63 of A-Z a-z 0-9 . _ -")
    return match["key"], match["value"]


class FiniteRange(click.FloatRange):
    """Numbers within limits. NaN is beyond no limit, and infinity only beyond one that is set: both are refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; a usage error when it is none, or not within the limits."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def output_option(function: F) -> F:
    """Add ``-o table|json|plain``."""
    choice = click.Choice([str(item) for item in Format])
    return click.option(
        "-o", "--output", type=choice, default="table", show_default=True, callback=_format, help="Form of the answer."
    )(function)


def _format(ctx: click.Context, param: click.Parameter, value: str) -> Format:
    return Format(value)


def address_option(function: F) -> F:
    """Add ``--address``."""
    return click.option(
        "--address",
        metavar="ADDRESS",
        help="Ray cluster to use. Default: RAY_ADDRESS, else the one `serve` started on this machine.",
    )(function)


def file_option(function: F) -> F:
    """Add ``-f FILE``."""
    return click.option(
        "-f",
        "--file",
        "config_path",
        type=click.Path(dir_okay=False),
        envvar="HETERO_LLM_CONFIG",
        metavar="FILE",
        help="Configuration, hetero-llm.yaml. Also taken from HETERO_LLM_CONFIG.",
    )(function)


def choice_options(function: F) -> F:
    """Add the flags that say how a model is to be laid out; `requests.Choices` holds them."""
    for option in reversed(_CHOICES):
        function = option(function)
    return function


_CHOICES = (
    click.option("--tp", type=count_or_auto, metavar="N|auto", help="Tensor-parallel size. Default: 1."),
    click.option(
        "--pp",
        type=click.IntRange(min=1),
        metavar="N",
        help="Pipeline-parallel size. Default: 1, or what --tp auto needs.",
    ),
    click.option(
        "--replicas", type=count_or_auto, metavar="N|auto", help="Number of replicas; auto: as many as fit. Default: 1."
    ),
    click.option(
        "--kind", "kinds", multiple=True, metavar="KIND", help="Only this kind of device; may be given several times."
    ),
    click.option("--accelerator", metavar="TYPE", help="Only this accelerator type, for example 910B2."),
    click.option(
        "--label",
        "labels",
        type=label,
        multiple=True,
        metavar="KEY=VALUE",
        help="Only nodes with this label, for example host=box-1; may be given several times.",
    ),
    click.option("--max-model-len", type=click.IntRange(min=1), metavar="TOKENS", help="Context length to serve."),
    click.option("--kv-cache-bytes", type=size_bytes, metavar="SIZE", help="KV cache per device, for example 512MiB."),
    click.option(
        "--gpu-memory-utilization",
        type=FiniteRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Share of a device's memory the engine may take. Default: 0.9.",
    ),
)
