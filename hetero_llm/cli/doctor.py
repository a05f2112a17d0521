"""``hetero-llm doctor``: checks of this machine or of a cluster's nodes, each failure with its fix."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, address_option, file_option, output_option
from hetero_llm.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from hetero_llm.cluster.doctor import NodeAnswer
    from hetero_llm.model import NodeInventory
    from hetero_llm.plugin import Check
    from hetero_llm.plugin.manager import PluginManager

WORDS = {True: "ok", False: "FAILED", None: "note"}
ALL_NODES = "all"


@click.command(cls=Verb)
@click.argument("kinds", nargs=-1, metavar="[KIND]…")
@click.option(
    "--node", "node", metavar="all|NODE", help="Have every node of the running cluster, or one, examine itself."
)
@click.option("--bundle", type=click.Path(), metavar="FILE.tar.gz", help="Also write what a report of a fault needs.")
@file_option
@address_option
@output_option
def command(
    kinds: tuple[str, ...],
    node: str | None,
    bundle: str | None,
    config_path: str | None,
    address: str | None,
    output: render.Format,
) -> int:
    """Check this machine, with a fix for each finding; of some kinds only, or of everything.

    A `note` is something that could not be decided here, or a restriction one can live with. Exit code 1 when a check
    failed. A kind without a device on the machine is not mentioned unless it is named.

    The bundle holds checks, versions, devices, the configuration and the ends of logs. Keys, tokens, prompts and the
    name of your home folder are taken out; host names stay. It says itself what it left out.
    """
    if node is not None and kinds:
        raise UsageError("--node examines whole nodes; leave the kinds out", next=("hetero-llm doctor --node all",))
    answers: tuple[NodeAnswer, ...] = ()
    if node is None:
        checks = local_checks(kinds)
    else:
        answers = _ask(address, node)
        checks = _compared(answers, node)
    if bundle is not None:
        _write_bundle(Path(bundle), checks, answers, config_path)
    return _show(checks, answers, output)


def local_checks(kinds: Sequence[str] = ()) -> tuple[Check, ...]:
    """Run the checks of this machine; only those of `kinds` when some are named.

    Raises:
        UnknownKind: a name in `kinds` has no usable backend.
    """
    from hetero_llm.cli.checks import general_checks
    from hetero_llm.cli.checks_devices import check_visible_devices, device_checks
    from hetero_llm.inventory.checkup import plugin_checks
    from hetero_llm.inventory.node import local_inventories
    from hetero_llm.matrix import load_matrix
    from hetero_llm.plugin.manager import load_plugins

    manager = load_plugins()
    chosen = tuple(manager.backend(kind).kind for kind in kinds)
    nodes = local_inventories(manager)
    found = device_checks(nodes, chosen, load_matrix())
    if chosen:
        return (*found, *plugin_checks(chosen))
    variables = filter(None, (backend.visible_devices_env for backend in manager.backends()))
    visible = check_visible_devices(os.environ, variables)
    of_plugins = plugin_checks(_kinds_here(manager, nodes), manager.checking_plugins())
    return (*general_checks(), visible, *found, *of_plugins, *manager.failed_plugin_checks())


def _kinds_here(manager: PluginManager, nodes: Iterable[NodeInventory]) -> list[str]:
    """Return the kinds whose hardware is here: an absent vendor is absent, and nothing else.

    Pretended devices have no driver to check.
    """
    real = (node.kind for node in nodes if node.problems or not all(device.simulated for device in node.devices))
    return [kind for kind in real if kind in manager.kinds()]


def _ask(address: str | None, node: str) -> tuple[NodeAnswer, ...]:
    from hetero_llm.cluster.session import connect

    session = connect(address)
    from hetero_llm.cluster.doctor import examine_nodes

    try:
        answers = examine_nodes(session, None if node == ALL_NODES else node)
    finally:
        session.close()
    if not answers:
        raise UsageError(f"the cluster has no node {node!r}", next=("hetero-llm node list",))
    return answers


def _compared(answers: Sequence[NodeAnswer], node: str) -> tuple[Check, ...]:
    from hetero_llm.cli.checks_cluster import check_answers, cluster_checks
    from hetero_llm.plugin.manager import load_plugins

    if node != ALL_NODES:
        return (check_answers(answers),)
    native = {backend.kind: backend.native_resource for backend in load_plugins().backends()}
    return cluster_checks(answers, native)


def _write_bundle(path: Path, checks: Sequence[Check], answers: Sequence[NodeAnswer], config_path: str | None) -> None:
    from hetero_llm.cli.bundle import write_bundle

    write_bundle(path, _data(checks, answers), Path(config_path) if config_path else None)
    render.say(f"wrote {path}; look through it before you send it")


def _show(checks: Sequence[Check], answers: Sequence[NodeAnswer], output: render.Format) -> int:
    data = _data(checks, answers)
    rows = [_row(check) for check in checks]
    rows += [_row(check, f"{answer.node}: ") for answer in answers for check in answer.checks]
    render.show(output, data, render.Table(("check", "result", "seen", "next"), tuple(rows), empty="no checks"))
    return ExitCode.OK if data["ok"] else ExitCode.FAILURE


def _row(check: Check, prefix: str = "") -> tuple[object, ...]:
    return (prefix + check.name, WORDS[check.ok], check.text, "; ".join(check.next) or None)


def _data(checks: Sequence[Check], answers: Sequence[NodeAnswer]) -> dict[str, Any]:
    all_checks = [*checks, *(check for answer in answers for check in answer.checks)]
    data: dict[str, Any] = {
        "ok": all(check.ok is not False for check in all_checks),
        "checks": [dataclasses.asdict(check) for check in checks],
    }
    if answers:
        data["nodes"] = [
            {"node": answer.node, "error": answer.error, "checks": [dataclasses.asdict(c) for c in answer.checks]}
            for answer in answers
        ]
    return data
