"""The engine's program: look which devices CUDA shows, refuse if they are others than meant, then become ``vllm``.

``python -m hetero_llm_cuda.vllm_entry serve MODEL …``. The variable `EXPECTED_ENV` lists the UUIDs that must be seen,
in order. Which card a number means depends on variables, on the driver's counting and on the container; this is the
only place where all of that has been applied. Only the driver library is asked; no context is made on any device.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from collections.abc import Sequence
from typing import Any

from hetero_llm_cuda.engine import EXPECTED_ENV
from hetero_llm_cuda.visible import VISIBLE_ENV

LIBRARY = "libcuda.so.1"
PROGRAM = ("-m", "vllm.entrypoints.cli.main")
_WORDS = {
    100: "no device is visible",
    802: "the system is not initialised: on NVSwitch machines nvidia-fabricmanager must run",
    803: "the driver's kernel module and libcuda are of different versions",
    804: "this card takes no forward-compatible CUDA: the driver is too old for the CUDA in use",
}


class DevicesUnusable(Exception):
    """CUDA shows no devices, or others than were meant."""


def main(arguments: Sequence[str]) -> None:
    """Check, then replace this process by vLLM; exit with 1 and one line of cause when the devices are not right."""
    expected = os.environ.pop(EXPECTED_ENV, "")
    try:
        if expected:
            check(expected.split(","), visible_uuids(load()))
    except DevicesUnusable as error:
        sys.stderr.write(f"DevicesUnusable: {error}\n")
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *PROGRAM, *arguments])


def load() -> Any:
    """Return the driver library. Raises DevicesUnusable when it cannot be loaded."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DevicesUnusable(f"{LIBRARY} cannot be loaded: {error}") from error


def visible_uuids(cuda: Any) -> list[str]:
    """Return the UUIDs of the devices CUDA shows this process, without a prefix, in CUDA's order."""
    _checked(cuda.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _checked(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_uuid(cuda, number) for number in range(count.value)]


def check(expected: Sequence[str], seen: Sequence[str]) -> None:
    """Raise DevicesUnusable unless exactly the `expected` UUIDs (``GPU-…``, ``MIG-…``) are seen, in that order."""
    # Drivers before 470 name instances after their card; CUDA's UUID of such an instance can't be told from that.
    if any(uid.startswith("MIG-GPU-") for uid in expected):
        return
    if [uid.split("-", 1)[1].lower() for uid in expected] != [uid.lower() for uid in seen]:
        value = os.environ.get(VISIBLE_ENV)
        raise DevicesUnusable(
            f"meant were {', '.join(expected)}; with {VISIBLE_ENV}={value} CUDA shows {', '.join(seen) or 'none'}"
        )


def _uuid(cuda: Any, number: int) -> str:
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _checked(cuda.cuDeviceGet(ctypes.byref(device), number), "cuDeviceGet")
    # The second version tells instances of one card apart; drivers before 11.4 have the first only.
    question = getattr(cuda, "cuDeviceGetUuid_v2", None) or cuda.cuDeviceGetUuid
    _checked(question(ctypes.byref(raw), device), "cuDeviceGetUuid")
    return str(uuid.UUID(bytes=bytes(raw)))


def _checked(status: int, call: str) -> None:
    if status != 0:
        raise DevicesUnusable(f"{call} failed with {status}: {_WORDS.get(status, 'see the CUDA driver API errors')}")


if __name__ == "__main__":
    main(sys.argv[1:])
