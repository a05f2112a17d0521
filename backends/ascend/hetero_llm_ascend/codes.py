"""The error numbers of the driver's management library (DCMI), in words, with the way out.

Source: the table of return codes in the DCMI API reference of the driver (HDK 23 to 26).
"""

from __future__ import annotations

import re

NOT_LOADED = -8005
NO_DEVICE = -8008
OCCUPIED = -8020
NOT_SUPPORTED = -8255
NO_FUNCTION = -99998
"""Ours: the library lacks the function."""

_GROUP = "usermod -a -G HwHiAiUser $USER   (then log in again)"
_DOCTOR = "hetero-llm doctor ascend"

_WORDS: dict[int, tuple[str, tuple[str, ...]]] = {
    -8001: ("a parameter was refused", ()),
    -8002: ("this user may not do that", (_GROUP,)),
    -8003: ("memory could not be copied from the driver", ()),
    -8004: ("a string function of the driver failed", ()),
    NOT_LOADED: (
        "the driver is not loaded, this user may not use it, or the machine was not restarted after a firmware update",
        ("lsmod | grep drv_", _GROUP, "restart the machine if driver or firmware were updated"),
    ),
    -8006: ("the device did not answer in time", ("npu-smi info -t health -i <NPU>",)),
    -8007: ("there is no device of this number", ()),
    NO_DEVICE: (
        "the device does not exist (any more)",
        ("lspci -d 19e5:", "restart the machine if it fell off the bus"),
    ),
    -8009: ("a call into the kernel driver failed", ("dmesg | grep -i -e davinci -e drv_",)),
    -8010: ("a message to the device could not be sent", ("dmesg | grep -i -e davinci -e drv_",)),
    -8011: ("no message came back from the device", ("dmesg | grep -i -e davinci -e drv_",)),
    -8012: ("the device is not ready yet", ("try again in a minute",)),
    -8013: ("this cannot be asked from inside a container", ()),
    -8014: ("a file of the driver could not be read", (_DOCTOR,)),
    -8015: ("the device could not be reset", ("restart the machine",)),
    -8017: ("the firmware is being updated", ("wait until the update is done",)),
    OCCUPIED: (
        "the device is taken exclusively by another container",
        ("stop that container, or give this one other devices (ASCEND_VISIBLE_DEVICES)",),
    ),
    -8022: ("the partitions of the device are inconsistent", ()),
    -8023: ("the configuration does not exist", ()),
    NOT_SUPPORTED: ("this device does not support the call", ()),
    NO_FUNCTION: ("the driver's library is too old and lacks the function", ("update the driver",)),
}


def words(code: int) -> str:
    """Return what a code means, number included."""
    meaning, _ = _WORDS.get(code, ("unknown error", ()))
    return f"{meaning} ({code})"


def steps(code: int) -> tuple[str, ...]:
    """Return what to do about a code; the doctor when nothing better is known."""
    _, next_steps = _WORDS.get(code, ("", ()))
    return next_steps or (_DOCTOR,)


def code_in(text: str) -> int | None:
    """Return the first DCMI code in what a tool printed (``ret is -8005``), None without one."""
    match = re.search(r"-(?:80\d\d|8255)\b", text)
    return int(match[0]) if match else None
