"""``hetero-llm lab``: a cluster of several nodes on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich_click import RichGroup

from hetero_llm.cli import render
from hetero_llm.cli.options import Verb, output_option
from hetero_llm.errors import ExitCode, NotRunning

if TYPE_CHECKING:
    from hetero_llm.cluster.lab import Lab
    from hetero_llm.cluster.lab_file import LabNode
    from hetero_llm.cluster.state import ServeRecord

RECORD = "lab"
END_DEADLINE_S = 120.0


@click.group(cls=RichGroup)
def command() -> None:
    """Start or end a cluster of several nodes on this machine, for demonstrations and tests."""


@command.command("up", cls=Verb)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@output_option
@click.pass_context
def up_command(ctx: click.Context, file: Path, output: render.Format) -> int:
    """Start the nodes FILE lists, and go on in the background when they are up.

    Each node is a Ray node of its own with the devices the file gives it, pretended or real. `serve` finds the cluster
    by itself; `lab down` ends it. deploy/lab/mixed.yaml is an example:

    nodes: [{name: gpu-a, kind: cuda, devices: "count=1,type=H100-80GB,memory=80GiB,engine=sim"}, {name: cpu-a, kind:
    cpu}]
    """
    from hetero_llm.cli.detach import NAME_ENV, start_detached
    from hetero_llm.cli.keeping import already_running
    from hetero_llm.cli.signals import StopSignals
    from hetero_llm.cluster.lab_file import load_lab
    from hetero_llm.cluster.state import all_live_records

    nodes = load_lab(file)
    if os.environ.pop(NAME_ENV, None) == RECORD:
        return _keep_up(nodes)
    if any(record.name == RECORD for record in all_live_records()):
        raise already_running(RECORD)
    with StopSignals():  # whoever stops this command does not want the lab
        record = start_detached(ctx.find_object(list) or [], RECORD)
    _show(record, nodes, output)
    return ExitCode.OK


@command.command("down", cls=Verb)
def down_command() -> int:
    """End the lab, and what is served on it. Returns when all is gone."""
    from hetero_llm.cli.keeping import wait_gone
    from hetero_llm.cluster.state import all_live_records, live_records

    lab = next((record for record in all_live_records() if record.name == RECORD), None)
    if lab is None:
        raise NotRunning("no lab runs on this machine", next=("hetero-llm lab up deploy/lab/mixed.yaml",))
    # Those that serve on it first: they leave in order while their cluster is still there.
    served = [record for record in live_records() if lab.address and record.address == lab.address]
    for record in (*served, lab):
        with suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
        if wait_gone(record, END_DEADLINE_S) != ExitCode.OK:
            return ExitCode.FAILURE
    render.say("the lab is down")
    return ExitCode.OK


class _KeptLab:
    """The lab as something to keep up."""

    def __init__(self, lab: Lab, wanted: Sequence[LabNode]):
        from hetero_llm.cli.phases import display_for_stderr

        self._lab = lab
        self._wanted = wanted
        self._display = display_for_stderr()

    def start(self) -> Mapping[str, Any]:
        from hetero_llm.cli.machine import devices_text
        from hetero_llm.plugin.manager import load_plugins

        self._display.step(f"starting {len(self._wanted)} nodes")
        self._lab.start(self._wanted, load_plugins())
        for node in self._lab.nodes:
            self._display.step(f"node {node.node} joined: {devices_text(node)}")
        return {"address": self._lab.agent.address, "nodes": tuple(node.node for node in self._lab.nodes)}

    def check(self) -> bool:
        self._lab.check(lambda text: render.say(f"{time.strftime('%H:%M:%S')} {text}"))
        return True

    def end(self) -> None:
        self._lab.end()


def _keep_up(wanted: Sequence[LabNode]) -> int:
    from dataclasses import replace

    from hetero_llm.cli.detach import log_path
    from hetero_llm.cli.keeping import keep_up
    from hetero_llm.cli.signals import StopSignals
    from hetero_llm.cluster.lab import Lab
    from hetero_llm.cluster.state import new_record

    with StopSignals() as signals:
        lab = Lab()
        kept = _KeptLab(lab, wanted)
        record = new_record(RECORD, started_unix_s=time.time(), log=str(log_path(RECORD)), role="lab")
        # The folder first of all: should this process be killed, the next command removes it.
        record = replace(record, temp_dir=lab.agent.root, token=lab.token)
        return keep_up(kept, record, signals)


def _show(record: ServeRecord, nodes: Sequence[LabNode], output: render.Format) -> None:
    kinds = dict.fromkeys(node.kind for node in nodes)
    serve = " ".join(["hetero-llm serve", *(f"--kind {kind}" for kind in kinds), "--replicas auto"])
    if output is render.Format.JSON:
        data = {"address": record.address, "nodes": record.nodes, "pid": record.pid, "token": record.token}
        render.show(output, {**data, "log": record.log, "serve": serve, "down": "hetero-llm lab down"})
        return
    render.line(f"The lab is up: {len(nodes)} nodes at {record.address}")
    render.line(f"  serve on it:  {serve}")
    render.line("  look at it:   hetero-llm node list")
    render.line("  end it:       hetero-llm lab down")
