"""What every source of facts about NPUs answers with: chips as they are read, before they become devices.

An Ascend chip has three numbers. The NPU and chip number is npu-smi's (a card and a place on it, with gaps), the
logical number 0..n-1 is what the runtime, ASCEND_RT_VISIBLE_DEVICES and Ray count in, the physical number is N of
/dev/davinciN. None of them stands in for another: a number that was not read is None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_llm.plugin import Health

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One NPU chip (one die of a two-die card). None is *not measured*.

    Attributes:
        npu_id: number of the card, with gaps (0, 32, 32768).
        chip_id: place on the card.
        logical_id: what ASCEND_RT_VISIBLE_DEVICES takes; None when the runtime does not count this chip.
        physical_id: N of /dev/davinciN.
        name: as the source says it, ``910B2``, ``Ascend910``.
        npu_name: the second name that tells the parts called ``Ascend910`` apart, ``9391``.
        bus_id: PCI address; chips of one card may share it.
        die_id: burnt into the chip.
        utilization: share of the AI cores at work, 0 to 1.
        links: logical number of a peer to the name of the link.
    """

    npu_id: int | None = None
    chip_id: int = 0
    logical_id: int | None = None
    physical_id: int | None = None
    name: str = ""
    npu_name: str = ""
    health: Health = Health.UNKNOWN
    memory_bytes: int | None = None
    used_bytes: int | None = None
    bus_id: str | None = None
    die_id: str | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Return how messages call this chip, by the numbers the operator sees in npu-smi."""
        if self.npu_id is not None:
            return f"NPU {self.npu_id} chip {self.chip_id}"
        return f"/dev/davinci{self.physical_id}" if self.physical_id is not None else f"device {self.logical_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a source could not answer, and the way out.

    Attributes:
        missing: it is not installed here; by itself no reason for concern.
    """

    text: str
    next: tuple[str, ...] = ()
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The answer of one source.

    Attributes:
        source: ``dcmi``, ``npu-smi``, ``acl``, ``/dev``.
        chips: every chip, unhealthy ones included; empty with no `failure` means that there is none.
        faults: one sentence per thing that hides or weakens a chip while the others were read.
    """

    source: str
    chips: tuple[Chip, ...] = ()
    faults: tuple[str, ...] = ()
    failure: Failure | None = None


def accelerator_name(name: str, npu_name: str = "") -> str:
    """Return the accelerator type as the hardware matrix spells it; ``unknown`` for an empty name.

    ``Ascend 910B2`` and ``910B2`` are ``910B2``; ``Ascend910`` with second name ``9391`` is ``910_9391``;
    ``Ascend950PR_9582`` is ``950PR``. Other names keep what a Ray resource and a label may contain.
    """
    text = name.strip().removeprefix("Ascend").strip()
    if text == "910" and re.fullmatch(r"\d{4}", npu_name.strip()):
        text = f"910_{npu_name.strip()}"
    if match := re.fullmatch(r"(950[A-Z]*)_\d+", text):
        text = match[1]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-")[:63] or "unknown"
