"""The command that serves a model with vLLM on held NVIDIA devices."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from hetero_llm.plugin import Device, EngineLaunch, EngineSpec, vllm_flags
from hetero_llm_cuda import log
from hetero_llm_cuda.visible import ORDER_ENV, PCI_ORDER, UUID_PREFIXES, VISIBLE_ENV

EXPECTED_ENV = "HETERO_LLM_CUDA_EXPECTED"
"""UUIDs the engine must find when it looks, in the order of CUDA_VISIBLE_DEVICES; see `vllm_entry`."""

OTHER_VISIBLE_ENVS = (
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_STALE = (*vllm_flags.STALE_ENVS, "VLLM_TARGET_DEVICE", "CUDA_LAUNCH_BLOCKING", "NCCL_COMM_ID")

# Weights of hundreds of gigabytes from a network disk, then compilation and graph capture.
_START_DEADLINE_S = 1800.0


def engine(spec: EngineSpec) -> EngineLaunch:
    """Return how to start vLLM for `spec`; its entry first checks that the devices it sees are the ones meant."""
    local = vllm_flags.local_devices(spec)
    return EngineLaunch(
        argv=(sys.executable, "-m", "hetero_llm_cuda.vllm_entry", "serve", spec.model_path, *_flags(spec)),
        env=_env(spec, local),
        env_remove=(*OTHER_VISIBLE_ENVS, *_STALE),
        headless=spec.node_rank > 0,
        phases=log.PHASES,
        root_causes=log.ROOT_CAUSES,
        facts=log.FACTS,
        start_deadline_s=_START_DEADLINE_S,
    )


def device_env(devices: Sequence[Device], environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Return the variables that make exactly `devices` visible, counted as NVML counts.

    Cards go by ascending number in the order of the PCI bus: every vLLM reads numbers. MIG instances have no number and
    go by UUID. Where the user set another CUDA_DEVICE_ORDER, numbers mean something else and cards go by UUID too.
    """
    order = environ.get(ORDER_ENV) or PCI_ORDER
    ids = ",".join(_id(device, by_uid=order != PCI_ORDER or _has_instance(devices)) for device in _ascending(devices))
    return {VISIBLE_ENV: ids, ORDER_ENV: order}


def is_instance(device: Device) -> bool:
    """Tell whether a device is a MIG instance."""
    return device.uid.startswith("MIG-") or "-MIG-" in device.accelerator


def _has_instance(devices: Sequence[Device]) -> bool:
    return any(is_instance(device) for device in devices)


def _ascending(devices: Sequence[Device]) -> list[Device]:
    return sorted(devices, key=lambda device: device.index)


def _id(device: Device, *, by_uid: bool) -> str:
    return device.uid if by_uid and device.uid.startswith(UUID_PREFIXES) else str(device.index)


def _flags(spec: EngineSpec) -> tuple[str, ...]:
    return (
        *vllm_flags.serve_flags(spec),
        # Stated even with a fixed cache: vLLM refuses to start when less than this share is free.
        *("--gpu-memory-utilization", f"{spec.gpu_memory_utilization:g}"),
        *(("--kv-cache-memory-bytes", str(spec.kv_cache_bytes)) if spec.kv_cache_bytes is not None else ()),
        *vllm_flags.user_flags(spec),
    )


def _env(spec: EngineSpec, local: Sequence[Device]) -> dict[str, str]:
    env = {
        **device_env(local),
        **vllm_flags.serve_env(spec),
        **collective_env(vllm_flags.interface_env(spec, "GLOO_SOCKET_IFNAME").get("GLOO_SOCKET_IFNAME")),
    }
    uids = [device.uid for device in _ascending(local)]
    if all(uid.startswith(UUID_PREFIXES) for uid in uids):
        env[EXPECTED_ENV] = ",".join(uids)
    return env


def collective_env(interface: str | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return NCCL's and Gloo's variables for ranks that meet on `interface`; what the user set himself stays.

    vLLM forms a Gloo group beside each NCCL group, so both are told. NCCL takes a name as a prefix unless it begins
    with ``=``. At level WARN it says why it failed; without, it only says that it did.
    """
    wanted = {"NCCL_DEBUG": "WARN"}
    if interface is not None:
        wanted |= {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface}
    return {name: environ.get(name) or value for name, value in wanted.items()}
