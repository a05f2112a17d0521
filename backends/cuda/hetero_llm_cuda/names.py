"""Names of NVIDIA accelerators: what the driver says, made fit to be a Ray resource; and what a chip can do."""

from __future__ import annotations

import re

_LONGEST = 63
_GIB = 1 << 30
_UNKNOWN = "unknown"

# Products sold with several memory sizes under one name; only these carry the size in theirs.
_SIZED = re.compile(r"(A100|A800|H100|H800|V100|GH200)(?![0-9A-Za-z])")
# The same chip on a narrower board: other clocks, other memory, other speed. Not the same accelerator.
_BOARDS = {"H100": ("PCIe", "NVL"), "H800": ("PCIe", "NVL")}
# For these the number in the name is the processor's memory.
_SIZE_OF_HOST = ("GH200",)
_MIG = re.compile(r"\s+MIG\s+(?P<profile>\S+)$")

_CAPABILITIES = (
    (re.compile(r"(B200|GB200)\b"), (10, 0)),
    (re.compile(r"(B300|GB300)\b"), (10, 3)),
    (re.compile(r"GB10\b"), (12, 1)),
    (re.compile(r"Thor\b"), (11, 0)),
    (re.compile(r"RTX-(50\d0|PRO-\d+)"), (12, 0)),
    (re.compile(r"(H100|H200|H800|H20|GH200)(?![0-9])"), (9, 0)),
    (re.compile(r"(L4|L20|L40S?|L2)(?![0-9A-Za-z])|RTX-40\d0|RTX-\d+(-SFF)?-Ada"), (8, 9)),
    (re.compile(r"(A100|A800|A30)(?![0-9A-Za-z])"), (8, 0)),
    (re.compile(r"Orin\b"), (8, 7)),
    (re.compile(r"(A10|A10G|A10M|A16|A2|A40)(?![0-9A-Za-z])|RTX-(30\d0|A\d+)"), (8, 6)),
    (re.compile(r"T4(?![0-9])|T\d00\b|RTX-20\d0|(Quadro-)?RTX-[3-8]000$|GTX-16\d0|TITAN-RTX"), (7, 5)),
    (re.compile(r"(V100|TITAN-V)\b"), (7, 0)),
    (re.compile(r"P100\b"), (6, 0)),
    (re.compile(r"(P40|P4|P6|GTX-10\d0)\b"), (6, 1)),
)
"""From NVIDIA's list of CUDA GPUs and their compute capabilities."""


def accelerator_name(name: str, memory_bytes: int | None = None) -> str:
    """Return the accelerator a driver's product name stands for.

    ``NVIDIA H100 80GB HBM3`` is ``H100-80GB``, ``NVIDIA GeForce RTX 4090`` is ``RTX-4090``, a MIG instance carries its
    profile: ``A100-40GB-MIG-1g.5gb``. A name nobody listed is kept, without the brand, in characters a Ray label takes.

    Args:
        name: product name, of a card or of a MIG instance.
        memory_bytes: memory of the whole card; tells sizes apart where the name does not.
    """
    profile = _MIG.search(name)
    product = _slug(re.sub(r"^(?:NVIDIA|GeForce|Tesla|\s)+(?=\S)", "", _MIG.sub("", name.strip())))
    card = _sized(product, memory_bytes)
    whole = f"{card}-MIG-{_slug(profile['profile'])}" if profile else card
    return whole[:_LONGEST].rstrip("-._") or _UNKNOWN


def mig_profile(slices: int, compute_slices: int, memory_mb: int) -> str:
    """Return the profile of a MIG instance from its share, ``1g.5gb``, or ``1c.3g.20gb`` for a part of its slices."""
    part = f"{compute_slices}c." if 0 < compute_slices < slices else ""
    return f"{part}{slices}g.{round(memory_mb / 1024)}gb"


def compute_capability(accelerator: str) -> tuple[int, int] | None:
    """Return major and minor compute capability of an accelerator by its name; None for a name not in the list."""
    return next((capability for chip, capability in _CAPABILITIES if chip.match(accelerator)), None)


def _sized(product: str, memory_bytes: int | None) -> str:
    match = _SIZED.match(product)
    if match is None:
        return product
    chip = match[1]
    board = next((board for board in _BOARDS.get(chip, ()) if board in product.split("-")), None)
    if board is not None:
        return f"{chip}-{board}"
    size_gb = _size_gb(chip, product, memory_bytes)
    return product if size_gb is None else f"{chip}-{size_gb}GB"


def _size_gb(chip: str, product: str, memory_bytes: int | None) -> int | None:
    """Return the size on the box. The driver keeps some for itself: 79.6 GiB are an 80 GB card."""
    stated = re.search(r"(?:^|-)(\d+)GB(?:-|$)", product)
    if stated and chip not in _SIZE_OF_HOST:
        return int(stated[1])
    return None if not memory_bytes else round(memory_bytes / _GIB)


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
