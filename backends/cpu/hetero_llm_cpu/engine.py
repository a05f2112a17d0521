"""The command that serves a model with vLLM on held core groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetero_llm.plugin import Device, EngineLaunch, EngineSpec, vllm_flags
from hetero_llm_cpu import log, topology

OTHER_VISIBLE_ENVS = (
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
)
_STALE = (
    *vllm_flags.STALE_ENVS,
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_PLUGINS",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
)
_LEAST_KV_BYTES = 1 << 26
_RESERVE_FROM_CORES = 2
"""Groups of at least this many cores without SMT keep one core free of OpenMP, as vLLM's own automatic binding does.

Seen with two cores and SmolLM2-135M at batch 8 while the machine had other work: one thread and a free core gave 149
tokens/s, two threads 35 to 74. Not yet repeated on an idle machine.
"""

_START_DEADLINE_S = 600.0


def engine(spec: EngineSpec) -> EngineLaunch:
    """Return how to start vLLM for `spec`.

    The environment pins each rank's OpenMP threads to its own cores; `cores` lets the core pin the whole tree.
    """
    local = vllm_flags.local_devices(spec)
    return EngineLaunch(
        argv=(sys.executable, "-m", "hetero_llm_cpu.vllm_entry", "serve", spec.model_path, *_flags(spec)),
        env=_env(spec, local),
        env_remove=(*OTHER_VISIBLE_ENVS, *_STALE),
        cores=tuple(sorted(core for device in local for core in device.cores)),
        headless=spec.node_rank > 0,
        phases=log.PHASES,
        root_causes=log.ROOT_CAUSES,
        facts=log.FACTS,
        start_deadline_s=_START_DEADLINE_S,
    )


def device_env(devices: Sequence[Device]) -> Mapping[str, str]:
    """Return the variable that binds one rank per device to that device's cores."""
    return {"VLLM_CPU_OMP_THREADS_BIND": bind_string(devices)}


def bind_string(devices: Sequence[Device], root: Path = topology.ROOT) -> str:
    """Return one list of logical CPUs per rank, ``0,1|2,3``: a single thread of each physical core."""
    return "|".join(",".join(str(cpu) for cpu in _openmp_cpus(device, root)) for device in devices)


def _openmp_cpus(device: Device, root: Path) -> tuple[int, ...]:
    cpus = topology.first_siblings(device.cores, root)
    without_smt = len(cpus) == len(device.cores)
    return cpus[:-1] if without_smt and len(cpus) >= _RESERVE_FROM_CORES else cpus


def _flags(spec: EngineSpec) -> tuple[str, ...]:
    return (
        *vllm_flags.serve_flags(spec),
        # Without this vLLM takes a share of NUMA node 0, whoever else lives there.
        *("--kv-cache-memory-bytes", str(_kv_cache_bytes(spec))),
        # Compiling takes minutes on few cores and gains little there.
        "--enforce-eager",
        *vllm_flags.user_flags(spec),
    )


def _kv_cache_bytes(spec: EngineSpec) -> int:
    if spec.kv_cache_bytes is not None:
        return spec.kv_cache_bytes
    smallest = min((device.memory_bytes for device in spec.devices if device.memory_bytes), default=0)
    return max(_LEAST_KV_BYTES, smallest // 4)


def _env(spec: EngineSpec, local: Sequence[Device]) -> dict[str, str]:
    return {
        **device_env(local),
        **vllm_flags.serve_env(spec),
        **vllm_flags.interface_env(spec, "GLOO_SOCKET_IFNAME"),
    }
