"""Talking to the driver through NVML: opened, asked, always closed. No CUDA context is made by any of it.

The library is that of nvidia-ml-py, imported only here and only when asked. Each question may fail alone: a board, a
driver or a container that does not answer one must not cost the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path("/")
PACKAGE = "nvidia-ml-py"
INSTALL = f"pip install {PACKAGE}"


class NvmlUnusable(Exception):
    """NVML cannot be used at all.

    Attributes:
        reason: why, in one line.
        next: ways out, most likely first.
        absent: nothing of the driver is there, so on a machine without NVIDIA hardware this is no problem.
    """

    def __init__(self, reason: str, *next: str, absent: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.next = next
        self.absent = absent


class Session:
    """An open NVML.

    Attributes:
        library: the module ``pynvml``.
        shadowed: the module is that of the old package ``pynvml``, not of nvidia-ml-py.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.shadowed = hasattr(library, "__path__")

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer of one function of the library, None when it has no answer."""
        return Handle(self.library, None).ask(question, *arguments)

    def count(self) -> int:
        """Return the number of cards. Raises NvmlUnusable when even that is not known."""
        try:
            return int(self.library.nvmlDeviceGetCount())
        except self.library.NVMLError as error:
            raise NvmlUnusable(f"the driver does not say how many GPUs there are: {error}", absent=False) from error

    def card(self, number: int) -> Handle:
        """Return card `number` in the order of the PCI bus; `Handle.failure` says when it cannot be had."""
        handle = Handle(self.library, None)
        handle.device = handle.ask("nvmlDeviceGetHandleByIndex", number)
        return handle

    def handle(self, device: Any) -> Handle:
        """Return what one asks about a device whose handle of the library is known, or None."""
        return Handle(self.library, device)

    def by_uid(self, uid: str) -> Handle:
        """Return the card or MIG instance with this UUID."""
        handle = Handle(self.library, None)
        handle.device = handle.ask("nvmlDeviceGetHandleByUUID", uid)
        return handle


class Handle:
    """One device, and what went wrong while it was asked.

    Attributes:
        device: the library's handle; None when there is none.
        failure: why the device cannot be used: it fell off the bus, needs a reset, or has no handle.
    """

    def __init__(self, library: Any, device: Any) -> None:
        self._library = library
        self.device = device
        self.failure: str | None = None
        self._errors: dict[str, int] = {}

    def get(self, question: str, *arguments: Any) -> Any:
        """Return the answer about this device, None when it has none."""
        return None if self.device is None else self.ask(question, self.device, *arguments)

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return the answer of a function of the library, None when it fails; a fatal failure is kept."""
        function = getattr(self._library, question, None)
        if function is None:
            return None
        try:
            return function(*arguments)
        except self._library.NVMLError as error:
            self._errors[question] = error.value
            if error.value in self._fatal() or question == "nvmlDeviceGetHandleByIndex":
                self.failure = str(error)
            return None

    def supports(self, question: str) -> bool:
        """Tell whether a question asked before was not refused as one that this device has no answer to, ever."""
        return bool(self._errors.get(question) != self._library.NVML_ERROR_NOT_SUPPORTED)

    def _fatal(self) -> tuple[int, ...]:
        return (self._library.NVML_ERROR_GPU_IS_LOST, self._library.NVML_ERROR_RESET_REQUIRED)


@contextmanager
def opened(root: Path = ROOT) -> Iterator[Session]:
    """Open NVML for the time of the block. Raises NvmlUnusable when it cannot be opened."""
    library = _library()
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        raise _init_failure(library, error, root) from error
    try:
        yield Session(library)
    finally:
        library.nvmlShutdown()


def text(value: Any) -> str | None:
    """Return a string of the library, which older versions give as bytes; None for None and for nothing."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return str(value).strip() or None if value is not None else None


def cuda_version(number: int | None) -> str | None:
    """Return ``12.2`` for 12020, the way NVML and CUDA count versions; None for None and 0."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def kernel_module_version(root: Path = ROOT) -> str | None:
    """Return the version of the loaded kernel module, as /proc tells it without any library."""
    try:
        line = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"Kernel Module\b.*?\s(\d+\.\d+(?:\.\d+)?)\s", line)
    return match[1] if match else None


def device_nodes(root: Path = ROOT) -> tuple[int, ...]:
    """Return the numbers of the ``/dev/nvidiaN`` nodes, ascending: the cards this system or container was given."""
    names = (path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*"))
    return tuple(sorted(int(name) for name in names if name.isdigit()))


def _library() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise NvmlUnusable(f"{PACKAGE} is not installed", INSTALL, absent=True) from error


def _init_failure(library: Any, error: Any, root: Path) -> NvmlUnusable:
    reboot = "reboot, or unload and load the nvidia kernel modules"
    if error.value == library.NVML_ERROR_LIB_RM_VERSION_MISMATCH:
        loaded = kernel_module_version(root) or "another version"
        reason = f"driver and library differ: the kernel module is {loaded}, the installed libraries are newer or older"
        return NvmlUnusable(reason, reboot, absent=False)
    if error.value == library.NVML_ERROR_LIBRARY_NOT_FOUND:
        advice = ("docker run --gpus all (NVIDIA Container Toolkit)", "install the NVIDIA driver's libraries")
        return NvmlUnusable("the driver's library libnvidia-ml.so.1 is not found", *advice, absent=True)
    if error.value == library.NVML_ERROR_DRIVER_NOT_LOADED:
        return NvmlUnusable("the kernel driver is not loaded", "modprobe nvidia", reboot, absent=True)
    if error.value == library.NVML_ERROR_NO_PERMISSION:
        advice = ("check who may open /dev/nvidia*", "add the user to the group that owns them")
        return NvmlUnusable("no permission to use the driver", *advice, absent=False)
    return NvmlUnusable(f"NVML cannot be started: {error}", "nvidia-smi", "dmesg | grep -i nvrm", absent=False)
