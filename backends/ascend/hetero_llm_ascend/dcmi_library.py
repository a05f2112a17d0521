"""The driver's management library ``libdcmi.so`` through ctypes: its structures and calls, each failing by itself.

Names, structures and the order of arguments are those of the DCMI API reference of the driver. Version 1 names a chip
by card and device; the 950's driver refuses that version's init and has version 2, which names it by its logical
number.
Nothing here opens a device: DCMI asks the driver and holds no context.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_char, c_int, c_uint, c_ulong, c_ulonglong
from typing import Any

from hetero_llm_ascend import codes

NAME = "libdcmi.so"
PLACES = ("/usr/local/dcmi", "/usr/local/Ascend/driver/lib64/driver", "/usr/local/Ascend/driver/lib64")
MAX_CARDS = 64


class ChipInfo(ctypes.Structure):
    """``dcmi_chip_info_v2``; ``dcmi_chip_info`` is the same without its last field."""

    _fields_ = (
        ("chip_type", c_char * 32),
        ("chip_name", c_char * 32),
        ("chip_ver", c_char * 32),
        ("aicore_cnt", c_uint),
        ("npu_name", c_char * 32),
    )


class PcieInfo(ctypes.Structure):
    """``dcmi_pcie_info_all``, 64 bytes."""

    _fields_ = (
        ("venderid", c_uint),
        ("subvenderid", c_uint),
        ("deviceid", c_uint),
        ("subdeviceid", c_uint),
        ("domain", c_int),
        ("bdf_busid", c_uint),
        ("bdf_deviceid", c_uint),
        ("bdf_funcid", c_uint),
        ("reserve", c_char * 32),
    )


class HbmInfo(ctypes.Structure):
    """``dcmi_hbm_info``; sizes in MiB."""

    _fields_ = (
        ("memory_size", c_ulonglong),
        ("freq", c_uint),
        ("memory_usage", c_ulonglong),
        ("temp", c_int),
        ("bandwith_util_rate", c_uint),
    )


class MemoryInfo(ctypes.Structure):
    """``dcmi_get_memory_info_stru``, for chips without HBM; sizes in MiB."""

    _fields_ = (
        ("memory_size", c_ulonglong),
        ("memory_available", c_ulonglong),
        ("freq", c_uint),
        ("hugepagesize", c_ulong),
        ("hugepages_total", c_ulong),
        ("hugepages_free", c_ulong),
        ("utiliza", c_uint),
        ("reserve", c_char * 60),
    )


class DieId(ctypes.Structure):
    """``dcmi_die_id``."""

    _fields_ = (("soc_die", c_uint * 5),)


class DcmiError(Exception):
    """A call failed. Its text says which, and what the code means."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: {codes.words(code)}")
        self.code = code


class LibraryNotFound(Exception):
    """The library is nowhere on this machine."""


class LibraryUnusable(Exception):
    """The library is there and cannot be loaded; the text is the loader's."""


def load(places: Iterable[str] = PLACES) -> ctypes.CDLL:
    """Load the library from the loader's search path, else from where the driver's installer puts it.

    Raises:
        LibraryNotFound: no such file.
        LibraryUnusable: the file or a library it needs cannot be loaded.
    """
    complaint = ""
    for path in (NAME, *(f"{place}/{NAME}" for place in places)):
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            # "path: cannot open …" is about the library itself; another name in front is one that it needs.
            if not str(error).startswith(f"{path}: cannot open shared object file"):
                complaint = complaint or str(error)
    if complaint:
        raise LibraryUnusable(complaint)
    raise LibraryNotFound(NAME)


def call(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    """Call a function of the library.

    Raises:
        DcmiError: it is missing, or returned something else than 0.
    """
    try:
        pointer = getattr(library, function)
    except AttributeError as error:
        raise DcmiError(function, codes.NO_FUNCTION) from error
    pointer.restype = c_int
    code = pointer(*arguments)
    if code != 0:
        raise DcmiError(function, code)


def has(library: ctypes.CDLL, function: str) -> bool:
    """Return whether the library has a function."""
    return hasattr(library, function)
