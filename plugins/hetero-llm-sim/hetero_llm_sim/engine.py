"""The command that starts a simulated engine, and ``python -m hetero_llm_sim.engine``, which is that engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_llm.plugin import Device, EngineLaunch, EngineSpec
from hetero_llm.plugin.flags import engine_flags
from hetero_llm_sim import log

VISIBLE_ENV = "SIM_VISIBLE_DEVICES"
SETTINGS_PREFIX = "HETERO_LLM_SIM_"
OTHER_VISIBLE_ENVS = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_START_DEADLINE_S = 120.0


def engine(spec: EngineSpec) -> EngineLaunch:
    """Return how to start the simulated engine for `spec`; its profile is the one named like the accelerator."""
    return EngineLaunch(
        argv=(sys.executable, "-m", "hetero_llm_sim.engine", "serve", spec.model_path, *_flags(spec)),
        env={**device_env(_local_devices(spec)), **_settings(os.environ), "PYTHONUNBUFFERED": "1"},
        env_remove=OTHER_VISIBLE_ENVS,
        headless=spec.node_rank > 0,
        phases=log.PHASES,
        root_causes=log.ROOT_CAUSES,
        facts=log.FACTS,
        start_deadline_s=_START_DEADLINE_S,
    )


def stand_in(launch: EngineLaunch, spec: EngineSpec) -> EngineLaunch:
    """Return the simulated engine in the place of the one `launch` starts; it keeps that one's flags and environment.

    The flags are vLLM's; those that mean nothing in a simulation are named in the engine's log.
    """
    flags = launch.argv[launch.argv.index("serve") :]
    return replace(
        launch,
        argv=(sys.executable, "-m", "hetero_llm_sim.engine", *flags, "--profile", spec.devices[0].accelerator),
        env={**launch.env, **_settings(os.environ), "PYTHONUNBUFFERED": "1"},
        health_path="/health",
        phases=log.PHASES,
        root_causes=log.ROOT_CAUSES,
        facts=log.FACTS,
        start_deadline_s=_START_DEADLINE_S,
    )


def device_env(devices: Sequence[Device]) -> Mapping[str, str]:
    """Return the variable that names the devices of one process."""
    return {VISIBLE_ENV: ",".join(str(index) for index in sorted(device.index for device in devices))}


def _local_devices(spec: EngineSpec) -> Sequence[Device]:
    """Return the devices of this node's ranks: ranks fill the nodes evenly, in order."""
    share = len(spec.devices) // spec.node_count
    return spec.devices[spec.node_rank * share : (spec.node_rank + 1) * share]


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    # The core keeps HETERO_LLM_* from engines; these are meant for them.
    return {name: value for name, value in environ.items() if name.startswith(SETTINGS_PREFIX)}


def _flags(spec: EngineSpec) -> tuple[str, ...]:
    return (
        *("--host", spec.host, "--port", str(spec.port)),
        *("--served-model-name", spec.served_name),
        *("--profile", spec.devices[0].accelerator),
        *("--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp)),
        *("--max-model-len", str(spec.max_model_len)),
        *(("--headless",) if spec.node_rank > 0 else ()),
        *engine_flags(spec.options),
        *spec.extra_args,
    )


def main(argv: Sequence[str]) -> int:
    """Be the engine; return the exit status."""
    # Only here: planning a simulated engine must not load its event loop.
    from hetero_llm_sim import options, server

    try:
        read = options.read_options(argv)
        profile, facts = read.settings.profile, read.settings.facts
        server.say(f"simulated {facts['accelerator']}, tp={facts['tp']}, pp={facts['pp']}, speed {facts['speed']:g}")
        server.say(f"KV cache size: {profile.kv_tokens:,} tokens in blocks of {profile.block_tokens}")
        if read.ignored:
            server.say(f"without effect in a simulated engine: {' '.join(read.ignored)}")
        if read.headless:
            server.wait_for_end()
        else:
            server.run(read.settings, read.faults, read.host, read.port)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
