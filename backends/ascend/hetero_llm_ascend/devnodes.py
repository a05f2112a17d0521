"""What the kernel shows of NPUs without any vendor software: /dev/davinciN and the PCI bus."""

from __future__ import annotations

import re
from pathlib import Path

from hetero_llm_ascend.chip import Chip, Reading

SOURCE = "/dev"
ROOT = Path("/")
_VENDOR = "0x19e5"
_ACCELERATOR_CLASS = "0x12"
"""PCI class *processing accelerator*. The vendor's display chip for server management has class 0x03 and is no NPU."""


def read(root: Path = ROOT) -> Reading:
    """Return one chip per device node, with its physical number and nothing else."""
    return Reading(source=SOURCE, chips=tuple(Chip(physical_id=number) for number in physical_ids(root)))


def physical_ids(root: Path = ROOT) -> tuple[int, ...]:
    """Return N of every /dev/davinciN, ascending by number. ``davinci_manager`` is no device."""
    names = (re.fullmatch(r"davinci(\d+)", path.name) for path in (root / "dev").glob("davinci*"))
    return tuple(sorted(int(match[1]) for match in names if match))


def pci_addresses(root: Path = ROOT) -> tuple[str, ...]:
    """Return the PCI addresses of the vendor's accelerators, ascending."""
    folders = (root / "sys/bus/pci/devices").glob("*")
    return tuple(sorted(folder.name for folder in folders if _is_npu(folder)))


def in_container(root: Path = ROOT) -> bool:
    """Return whether the engine of a container left its mark here."""
    return any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io"))


def numa_node(bus_id: str | None, root: Path = ROOT) -> int | None:
    """Return the NUMA node of a PCI device, None when the kernel does not know it."""
    if bus_id is None:
        return None
    text = _text(root / "sys/bus/pci/devices" / bus_id.lower() / "numa_node")
    return int(text) if text.isdigit() else None


def _is_npu(folder: Path) -> bool:
    return _text(folder / "vendor").lower() == _VENDOR and _text(folder / "class").startswith(_ACCELERATOR_CLASS)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
