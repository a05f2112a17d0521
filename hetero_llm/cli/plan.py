"""``hetero-llm plan``: what serve would do, without doing it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import (
    ENGINE_ARGS,
    EngineVerb,
    address_option,
    choice_options,
    file_option,
    output_option,
)
from hetero_llm.cli.requests import Choices, ModelRequest, model_requests
from hetero_llm.errors import ExitCode, PlanInfeasible
from hetero_llm.model import NodeInventory, to_data

if TYPE_CHECKING:
    from hetero_llm.plugin.manager import PluginManager


@click.command(cls=EngineVerb)
@click.argument("model")
@file_option
@choice_options
@click.option(
    "--inventory",
    type=click.Path(),
    metavar="FILE",
    help="Plan on the devices of this file, the output of `devices -o json` of any machine or cluster.",
)
@address_option
@output_option
@click.pass_context
def command(ctx: click.Context, /, model: str, output: render.Format, **given: Any) -> int:
    """Show where a model would go, and why not elsewhere.

    Takes the same choices as serve, words for the engine after `--` too. Exit code 1 when it does not fit. Uses the
    running cluster if there is one, else this machine's devices; HETERO_LLM_OVERRIDE_<KIND> (for example
    count=2,type=H100-80GB,memory=80GiB) pretends to others, without Ray.
    """
    from hetero_llm.config import load_config

    path = Path(given["config_path"]) if given["config_path"] else None
    requests = model_requests((model,), load_config(path).config, Choices.of(given), ctx.meta[ENGINE_ARGS])
    return show_plans(requests, given["address"], given["inventory"], output)


def show_plans(
    requests: tuple[ModelRequest, ...], address: str | None, inventory: str | None, output: render.Format
) -> int:
    """Print a plan per request and return the exit code: 0 when all are feasible."""
    from hetero_llm.cli.planning import infeasible, plan_tables
    from hetero_llm.cli.supervisor import plan_all
    from hetero_llm.plugin.manager import load_plugins

    manager = load_plugins()
    plans = plan_all(requests, planned_nodes(manager, address, inventory), manager, strict=False)
    data = to_data(plans[0] if len(plans) == 1 else plans)
    render.show(output, data, *(table for plan in plans for table in plan_tables(plan)))
    misses: list[PlanInfeasible] = [
        infeasible(request, plan) for request, plan in zip(requests, plans, strict=True) if not plan.feasible
    ]
    if misses and output is not render.Format.JSON:
        render.error(misses[0].report)
    return ExitCode.FAILURE if misses else ExitCode.OK


def planned_nodes(manager: PluginManager, address: str | None, inventory: str | None) -> tuple[NodeInventory, ...]:
    """Return the nodes to plan on: of a file, of an override, of the running cluster, else of this machine."""
    from hetero_llm.cli.machine import cluster_is_known, cluster_nodes, local_nodes
    from hetero_llm.inventory.node import load_inventory
    from hetero_llm.inventory.override import overridden_kinds

    if inventory is not None:
        return load_inventory(Path(inventory)).nodes
    if not overridden_kinds() and cluster_is_known(address):
        return cluster_nodes(address)
    return local_nodes(manager)
