"""Facts from the runtime of the CANN toolkit (``import acl``), for containers that have it and no driver tools.

Memory is known only inside a device context. It is opened for one device at a time and closed again, whatever happens:
a context left open takes memory and, in exclusive mode, the device.
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from hetero_llm.plugin import Health
from hetero_llm_ascend.chip import Chip, Failure, Reading

SOURCE = "acl"
_HBM, _DDR = 1, 0
_ALREADY = 100002
"""ACL_ERROR_REPEAT_INITIALIZE."""

_SET_ENV = ("source /usr/local/Ascend/ascend-toolkit/set_env.sh",)


def read(runtime: Any = None) -> Reading:
    """Return the devices the runtime counts. May hang or crash with the driver: runs in a process of its own."""
    if runtime is None:
        try:
            runtime = importlib.import_module("acl")
        except ModuleNotFoundError:
            return Reading(source=SOURCE, failure=Failure(text="the acl module is not installed", missing=True))
        except ImportError as error:
            return Reading(source=SOURCE, failure=Failure(text=f"acl cannot be loaded: {error}", next=_SET_ENV))
    code = runtime.init()
    if code not in (0, _ALREADY):
        return Reading(source=SOURCE, failure=Failure(text=f"acl.init: error {code}", next=_SET_ENV))
    try:
        return _read_initialised(runtime)
    finally:
        runtime.finalize()


def _read_initialised(runtime: Any) -> Reading:
    count, code = runtime.rt.get_device_count()
    if code != 0:
        advice = ("npu-smi info", "hetero-llm doctor ascend")
        return Reading(source=SOURCE, failure=Failure(text=f"acl.rt.get_device_count: error {code}", next=advice))
    name = str(runtime.get_soc_name() or "") if count else ""
    read = [_chip(runtime, index, name) for index in range(count)]
    faults = tuple(fault for _, fault in read if fault)
    return Reading(source=SOURCE, chips=tuple(chip for chip, _ in read), faults=faults)


def _chip(runtime: Any, index: int, name: str) -> tuple[Chip, str]:
    """Return one device and what is wrong with it. It is healthy as far as the runtime can tell: it opens."""
    code = runtime.rt.set_device(index)
    if code != 0:
        chip = Chip(logical_id=index, name=name, health=Health.FAILED)
        return chip, f"device {index} cannot be opened: acl.rt.set_device gives error {code}"
    try:
        free, total = _memory(runtime)
    finally:
        runtime.rt.reset_device(index)
    chip = Chip(logical_id=index, name=name, health=Health.OK)
    return (replace(chip, memory_bytes=total, used_bytes=total - free) if total else chip), ""


def _memory(runtime: Any) -> tuple[int, int]:
    """Return (free, total) bytes of the open device, zeros when the runtime does not say."""
    for kind in (_HBM, _DDR):
        free, total, code = runtime.rt.get_mem_info(kind)
        if code == 0 and total > 0:
            return free, total
    return 0, 0
