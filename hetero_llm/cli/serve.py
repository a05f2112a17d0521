"""``hetero-llm serve``: check everything that can be checked at once, then supervise."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetero_llm.cli import render
from hetero_llm.cli.options import (
    ENGINE_ARGS,
    EngineVerb,
    FiniteRange,
    choice_options,
    file_option,
    output_option,
)
from hetero_llm.cli.requests import Choices, ModelRequest, model_requests, unsupported_notes
from hetero_llm.errors import ExitCode, HeteroError

if TYPE_CHECKING:
    from hetero_llm.cli.ready import ReadyInfo
    from hetero_llm.cli.signals import StopSignals
    from hetero_llm.cli.supervisor import ServeJob, Supervisor
    from hetero_llm.config import Config
    from hetero_llm.gateway.options import GatewayOptions


_ADDRESS_HELP = "Cluster to join; local: a new one. Default: RAY_ADDRESS, else a lab or node here, else a new one."


@click.command(cls=EngineVerb)
@click.argument("models", nargs=-1, metavar="[MODEL]…")
@file_option
@choice_options
@click.option("--host", metavar="H", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65535), metavar="P", help="Port; 0 for any free one. Default: 8000.")
@click.option("--api-keys", type=click.Path(), metavar="FILE", help="File of API keys that clients must use.")
@click.option("--no-auth", is_flag=True, help="Allow an address that others can reach, without keys.")
@click.option("--address", metavar="ADDRESS", help=_ADDRESS_HELP)
@click.option("--dry-run", is_flag=True, help="Show the plan and stop.")
@click.option("--detach", is_flag=True, help="Go on in the background once it is ready.")
@click.option("--start-timeout-s", type=FiniteRange(min=1), metavar="N", help="Limit for loading. Default: 600.")
@output_option
@click.pass_context
def command(ctx: click.Context, /, models: tuple[str, ...], output: render.Format, **given: Any) -> int:
    """Deploy models and watch them.

    MODEL is an alias, a folder, or the hub id of a model that is on this machine. Without one, and without a
    configuration, the bundled demo model runs on the CPU. Starts a local cluster unless one is named. Words after
    `--` go to the engine as they are. Ctrl-C stops everything that was started.
    """
    from hetero_llm.cli.machine import gateway_of
    from hetero_llm.cli.signals import StopSignals

    started_s = time.monotonic()
    with StopSignals() as signals:
        config = _config(given)
        for note in unsupported_notes(config):
            render.say(f"note: {note}")
        requests = _requests(models, config, given, ctx.meta[ENGINE_ARGS])
        if given["dry_run"]:
            return _dry_run(requests, _address(config), output)
        address = _address(config)
        url = gateway_of(address)
        if url and any(given[flag] is not None for flag in ("host", "port", "api_keys")):
            render.say(f"note: this cluster has its gateway at {url}; --host, --port and --api-keys change nothing")
        gateway = _gateway(config, no_auth=given["no_auth"], listens=url is None)
        name = os.environ.pop(_name_env(), None)
        if given["detach"] and name is None:
            return _detach(ctx.find_object(list) or [], requests, bool(gateway.keys), output)
        return _supervise(_job(requests, gateway, address, name, started_s), signals, output)


def _config(given: dict[str, Any]) -> Config:
    from hetero_llm.config import load_config

    path = Path(given["config_path"]) if given["config_path"] else None
    flags = {"cluster.address": given["address"], "gateway.host": given["host"], "gateway.port": given["port"]}
    flags["gateway.api_keys_file"] = given["api_keys"]
    return load_config(path, flags=flags).config


def _requests(
    models: tuple[str, ...], config: Config, given: dict[str, Any], engine_args: tuple[str, ...]
) -> tuple[ModelRequest, ...]:
    requests = model_requests(models, config, Choices.of(given), engine_args)
    timeout_s = given["start_timeout_s"]
    return requests if timeout_s is None else tuple(replace(item, start_timeout_s=timeout_s) for item in requests)


def _address(config: Config) -> str | None:
    """Return the cluster to join, None to start one."""
    from hetero_llm.cli.machine import cluster_to_join

    if config.cluster.address == "auto":
        return cluster_to_join()
    return None if config.cluster.address == "local" else config.cluster.address


def _gateway(config: Config, *, no_auth: bool, listens: bool) -> GatewayOptions:
    """Return the options; `listens`: a gateway is going to be started, so its address must be free and safe."""
    from hetero_llm.cli.listen import check_address
    from hetero_llm.gateway.auth import load_keys
    from hetero_llm.gateway.options import GatewayOptions

    gateway = config.gateway
    keys = load_keys(gateway.api_keys_file) if gateway.api_keys_file is not None else ()
    if listens:
        check_address(gateway.host, gateway.port, has_keys=bool(keys), no_auth=no_auth)
    return GatewayOptions(host=gateway.host, port=gateway.port, keys=keys, max_body_bytes=gateway.max_body_bytes)


def _name_env() -> str:
    from hetero_llm.cli.detach import NAME_ENV

    return NAME_ENV


def _job(
    requests: tuple[ModelRequest, ...], gateway: GatewayOptions, address: str | None, name: str | None, started_s: float
) -> ServeJob:
    from hetero_llm.cli.detach import log_path, record_name
    from hetero_llm.cli.supervisor import ServeJob

    return ServeJob(
        name=name or record_name(requests[0].name or requests[0].source),
        requests=requests,
        gateway=gateway,
        address=address,
        started_s=started_s,
        log=str(log_path(name)) if name else None,
    )


def _supervise(job: ServeJob, signals: StopSignals, output: render.Format) -> int:
    from hetero_llm.cli.phases import display_for_stderr
    from hetero_llm.cli.supervisor import Supervisor

    supervisor = Supervisor(job, display_for_stderr(), signals)
    failure: HeteroError | None = None
    try:
        return _serve(supervisor, output)
    except HeteroError as error:
        failure = error
        render.say(f"failed: {error}; taking down what was started")
        raise
    finally:
        signals.hold()
        try:
            supervisor.close()
        finally:
            supervisor.end_record(failure)


def _serve(supervisor: Supervisor, output: render.Format) -> int:
    from hetero_llm.cli.supervisor import StoppedFromOutside

    try:
        info = supervisor.start()
        _show_ready(info, output)
        supervisor.watch()
    except StoppedFromOutside:
        render.say("stopped before it was ready")
        return ExitCode.OK
    render.say("the last model was stopped")
    return ExitCode.OK


def _show_ready(info: ReadyInfo, output: render.Format) -> None:
    from hetero_llm.cli.ready import ready_data, ready_lines

    if output is render.Format.JSON:
        render.show(output, ready_data(info))
        return
    for text in ready_lines(info):
        render.line(text)


def _detach(argv: list[str], requests: Sequence[ModelRequest], has_keys: bool, output: render.Format) -> int:
    from hetero_llm.cli.detach import record_name, start_detached
    from hetero_llm.cli.ready import ReadyInfo

    record = start_detached(argv, record_name(requests[0].name or requests[0].source))
    assert record.url is not None
    info = ReadyInfo(
        url=record.url,
        models={name: record.shapes.get(name) for name in record.models},
        has_keys=has_keys,
        seconds=time.time() - record.started_unix_s,
        pid=record.pid,
        foreground=False,
    )
    _show_ready(info, output)
    return ExitCode.OK


def _dry_run(requests: tuple[ModelRequest, ...], address: str | None, output: render.Format) -> int:
    from hetero_llm.cli.plan import show_plans

    return show_plans(requests, address, None, output)
