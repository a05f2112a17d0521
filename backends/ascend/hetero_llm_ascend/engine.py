"""The command that serves a model with vLLM and vllm-ascend on held devices."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hetero_llm.plugin import Device, EngineLaunch, EngineSpec, EngineUnfit, vllm_flags
from hetero_llm_ascend import group, log, models, versions, visible

BLOCK_TOKENS = 128
"""Tokens per KV-cache block; vllm-ascend sets other sizes back to it with prefix caching or chunked prefill."""

OTHER_VISIBLE_ENVS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_STALE = (
    *vllm_flags.STALE_ENVS,
    *group.STALE,
    "VLLM_TARGET_DEVICE",
    "VLLM_VERSION",
)
"""Beside the launchers' left-overs: VLLM_VERSION makes vllm-ascend believe in another vLLM than the one installed."""

_START_DEADLINE_S = 1800.0
"""Graphs are compiled at the first start of a model; tens of minutes were seen for large ones."""


def engine(spec: EngineSpec) -> EngineLaunch:
    """Return how to start vLLM for `spec`.

    Raises:
        EngineUnfit: vllm-ascend and vLLM are of different versions; it would load and die later.
    """
    local = vllm_flags.local_devices(spec)
    _check_versions(local)
    env = _env(spec, local)
    return EngineLaunch(
        argv=(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", spec.model_path, *_flags(spec, local)),
        env=env,
        env_remove=tuple(dict.fromkeys((*OTHER_VISIBLE_ENVS, *_STALE))),
        headless=spec.node_rank > 0,
        phases=log.PHASES,
        root_causes=log.root_causes(env),
        facts=log.FACTS,
        start_deadline_s=_START_DEADLINE_S,
    )


def device_env(devices: Sequence[Device]) -> Mapping[str, str]:
    """Return the variable that makes exactly `devices` visible: ascending logical numbers, as torch_npu wants them."""
    return {visible.VARIABLE: visible.value(devices)}


def _check_versions(devices: Sequence[Device]) -> None:
    mismatch = versions.plugin_mismatch() or versions.torch_mismatch()
    if mismatch is None or all(device.simulated for device in devices):
        return
    advice = ("start the node from the vllm-ascend image of one version", "hetero-llm doctor ascend")
    raise EngineUnfit(mismatch, cause="it would load, patch the other version, and die later", next=advice)


def _flags(spec: EngineSpec, devices: Sequence[Device]) -> tuple[str, ...]:
    accelerator = devices[0].accelerator if devices else ""
    quantization = models.quantization_in(spec.model_path)
    dtype = models.serving_dtype(spec.dtype, accelerator, quantization)
    return (
        *vllm_flags.serve_flags(replace(spec, dtype=dtype)),
        *("--block-size", str(BLOCK_TOKENS)),
        *("--gpu-memory-utilization", f"{spec.gpu_memory_utilization:g}"),
        *(() if spec.kv_cache_bytes is None else ("--kv-cache-memory-bytes", str(spec.kv_cache_bytes))),
        *(("--quantization", models.MODELSLIM) if quantization == models.MODELSLIM else ()),
        # 310P has no graphs.
        *(("--enforce-eager",) if models.is_310p(accelerator) else ()),
        *vllm_flags.user_flags(spec),
    )


def _env(spec: EngineSpec, devices: Sequence[Device]) -> dict[str, str]:
    address = vllm_flags.own_address(spec) or vllm_flags.LOOPBACK
    return {
        **device_env(devices),
        **vllm_flags.serve_env(spec),
        **group.hccl_env(address, devices),
        # The platform plugin is chosen by name: without it vLLM goes on as CPU, without a word.
        "VLLM_PLUGINS": ",".join(versions.plugin_names()),
        # A forked worker inherits a runtime that is set up for another process.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
