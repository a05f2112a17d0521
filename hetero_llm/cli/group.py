"""The verbs, by name and one line of help; a verb's module is imported only when it runs.

The top level is a plain click group: rich-click's rendering alone takes 0.1 s, more than all else here together. The
verbs themselves are rich-click commands.
"""

from __future__ import annotations

import difflib
import importlib

import click

PROGRAM = "hetero-llm"

SECTIONS: dict[str, dict[str, str]] = {
    "Run": {
        "serve": "Deploy models and watch them; with no model, the bundled demo model on the CPU.",
        "chat": "Talk to a running model.",
        "status": "Show the running replicas.",
        "logs": "Print the engine log of a replica.",
        "stop": "Stop a model, or all of them.",
        "drain": "Move every replica off a node.",
    },
    "Look before": {
        "plan": "Show where a model would go, and why not elsewhere.",
        "devices": "List every device of every kind: health, memory, holder.",
        "models": "List, show or remove local models.",
        "plugins": "List plugins with their status and its reason.",
        "doctor": "Check this machine, with a fix for each finding.",
    },
    "Cluster": {
        "node": "Start a cluster, join one, leave it, list its nodes.",
        "lab": "Start or end a cluster of several nodes on this machine.",
    },
    "Help": {
        "config": "Show, check or describe the configuration.",
        "explain": "Explain an error code.",
        "completion": "Print the completion script of a shell.",
        "version": "Print versions of hetero-llm, Ray and the engine.",
    },
}
"""Section to verb to help line, in the order ``--help`` lists them."""

VERBS = {verb: text for section in SECTIONS.values() for verb, text in section.items()}
"""Verb to help line. Each verb is the `command` of ``hetero_llm.cli.<verb>``."""


class LazyGroup(click.Group):
    """A group that knows its commands' help lines without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the verbs in reading order."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a verb; a name that is none of ours may be a plugin's."""
        if cmd_name in VERBS:
            command: click.Command = importlib.import_module(f"{__package__}.{cmd_name}").command
            return command
        return None if cmd_name.startswith("-") else _plugin_command(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb of `args`; a misspelt one is answered with the nearest."""
        near = difflib.get_close_matches(args[0], VERBS, n=1)
        if near and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section, without importing one."""
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))


def _plugin_command(name: str) -> click.Command | None:
    from hetero_llm.plugin.manager import load_plugins

    return next((command for command in load_plugins().cli_commands() if command.name == name), None)


@click.group(cls=LazyGroup, name=PROGRAM, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name=PROGRAM, prog_name=PROGRAM, message="%(prog)s %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")
def cli() -> None:
    """One OpenAI-compatible endpoint for one model on unequal accelerators.

    Start with `hetero-llm serve`; `hetero-llm VERB --help` describes a verb. Plugins may add verbs.
    """
