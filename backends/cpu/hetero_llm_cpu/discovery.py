"""CPU devices: groups of physical cores within one NUMA node, and the name of the instruction-set level."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from hetero_llm.plugin import Device, DeviceUsage, Discovery, Health, Problem
from hetero_llm_cpu import topology
from hetero_llm_cpu.topology import ROOT, Core, Memory

KIND = "cpu"
GROUP_ENV = "HETERO_LLM_CPU_CORES_PER_DEVICE"
_LARGEST_DEFAULT_GROUP = 8
_FAMILIES = ("xeon", "epyc", "ryzen", "threadripper")
_DISCOVERY_FAILED = "HL203"


def discover(root: Path = ROOT, allowed: frozenset[int] | None = None, host: str | None = None) -> Discovery:
    """Return this machine's core groups, ascending by NUMA node, then core.

    A group has `GROUP_ENV` physical cores, by default half of a NUMA node's but at most 8 and at least 1, so that two
    replicas (or TP=2) fit on the smallest machine. Cores that fill no group stay free for everything else.
    """
    problems: list[Problem] = []
    wanted = _wanted_group_size(problems)
    host = host or socket.gethostname()
    accelerator = accelerator_name(root)
    memory = topology.memory_by_numa(root)
    devices: list[Device] = []
    for numa, cores in _by_numa(topology.cores(root, allowed)).items():
        groups = _groups(cores, _group_size(numa, len(cores), wanted, problems))
        share = memory.get(numa)
        for group in groups:
            devices.append(
                Device(
                    kind=KIND,
                    accelerator=accelerator,
                    uid=f"cpu-{host}-{group[0].cpus[0]}-{group[-1].cpus[0]}",
                    index=len(devices),
                    card=group[0].package,
                    memory_bytes=share.total_bytes // len(groups) if share else None,
                    free_bytes=share.free_bytes // len(groups) if share else None,
                    health=Health.OK,
                    numa=numa,
                    cores=tuple(sorted(cpu for core in group for cpu in core.cpus)),
                    unified_memory=True,
                )
            )
    return Discovery(devices=tuple(devices), problems=tuple(problems), source="/proc, /sys")


def accelerator_name(root: Path = ROOT) -> str:
    """Return product family and widest instruction set, ``xeon-amx``, ``epyc-avx512``, ``x86-avx2``, ``arm-neon``."""
    flags = topology.cpu_flags(root)
    if "asimd" in flags:
        return "arm-sve" if "sve" in flags else "arm-neon"
    model = topology.cpuinfo(root).get("model name", "").lower()
    family = next((name for name in _FAMILIES if name in model), "x86")
    return f"{family}-{isa_level(flags)}"


def isa_level(flags: frozenset[str]) -> str:
    """Return the widest x86 level vLLM has kernels for: ``amx``, ``avx512``, ``avx2``, else ``sse``."""
    if not {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        return "avx2" if "avx2" in flags else "sse"
    return "amx" if "amx_tile" in flags else "avx512"


def usage(devices: tuple[Device, ...], root: Path = ROOT) -> tuple[DeviceUsage, ...]:
    """Return memory in use per device: its NUMA node's, shared evenly by the node's devices as `discover` does."""
    memory = topology.memory_by_numa(root)
    return tuple(DeviceUsage(uid=d.uid, used_bytes=_used_bytes(d, memory.get(d.numa or 0))) for d in devices)


def _used_bytes(device: Device, node: Memory | None) -> int | None:
    if node is None or device.memory_bytes is None or node.total_bytes == 0:
        return None
    return device.memory_bytes * (node.total_bytes - node.free_bytes) // node.total_bytes


def _by_numa(cores: tuple[Core, ...]) -> dict[int, list[Core]]:
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.numa, []).append(core)
    return nodes


def _groups(cores: list[Core], size: int) -> list[list[Core]]:
    return [cores[start : start + size] for start in range(0, len(cores) - size + 1, size)]


def _group_size(numa: int, available: int, wanted: int | None, problems: list[Problem]) -> int:
    if wanted is None:
        return max(1, min(_LARGEST_DEFAULT_GROUP, available // 2))
    if wanted > available:
        text = f"{GROUP_ENV} asks for {wanted} cores per device, NUMA node {numa} has {available}; using {available}"
        problems.append(_problem(text, f"set {GROUP_ENV} to at most {available}"))
    return min(wanted, available)


def _wanted_group_size(problems: list[Problem]) -> int | None:
    text = os.environ.get(GROUP_ENV, "").strip()
    if not text:
        return None
    if re.fullmatch(r"[1-9][0-9]{0,4}", text):
        return int(text)
    problems.append(
        _problem(f"{GROUP_ENV} must be a whole number above 0, not {text!r}; ignored", f"unset {GROUP_ENV}")
    )
    return None


def _problem(text: str, advice: str) -> Problem:
    return Problem(kind=KIND, code=_DISCOVERY_FAILED, text=text, next=(advice,))
