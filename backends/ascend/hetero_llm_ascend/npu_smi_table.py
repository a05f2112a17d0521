"""Reads the tables of ``npu-smi``, by the words in their headers, never by version, width or position.

``npu-smi info`` gives two rows per chip, under a header of two rows; a cell of the header may hold several columns::

    | NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
    | Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
    +===========================+===============+====================================================+
    | 0     Ascend910           | OK            | 170.7       49                0    / 0             |
    | 0     0                   | 0000:9D:00.0  | 0           0    / 0          3131 / 65536         |

A table of processes follows. The layouts that are known are in tests/samples/ascend.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hetero_llm.plugin import Health
from hetero_llm_ascend.chip import MIB, Chip

_COLUMNS = (
    r"NPU Util\(%\)|NPU|Name|Chip|Device|Phy-ID|Health|Bus-Id|Power\(W\)|Temp\(C\)"
    r"|Hugepages-Usage\(page\)|AICore\(%\)|Memory-Usage\(MB\)|HBM-Usage\(MB\)"
)
_PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")
_HEALTH = {"ok": Health.OK, "warning": Health.DEGRADED, "alarm": Health.FAILED, "critical": Health.FAILED}
_Cells = list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """What ``npu-smi info -m`` says of one chip; None where it has no such column."""

    logical_id: int | None
    physical_id: int | None


def parse_info(text: str) -> tuple[tuple[Chip, ...], tuple[str, ...]]:
    """Return the chips in the output of ``npu-smi info``, and one sentence per row that could not be read."""
    header, rows = _split_header(list(_device_rows(text)))
    chips: list[Chip] = []
    faults: list[str] = []
    while rows:
        first = _fields(header[0], rows[0])
        # The row below is this chip's second one, or the next chip if that row is missing.
        alone = len(rows) == 1 or _is_first(_fields(header[0], rows[1]))
        if _is_first(first) and not alone:
            chips.append(_chip(first, _fields(header[1], rows[1])))
        else:
            faults.append(f"npu-smi info has a row that cannot be read: {' | '.join(rows[0])[:120]}")
        rows = rows[1:] if alone else rows[2:]
    return tuple(chips), tuple(faults)


def parse_map(text: str) -> tuple[Mapping[tuple[int | None, int], Mapped], tuple[str, ...]]:
    """Return what ``npu-smi info -m`` says, by NPU and chip number, and one sentence per row that could not be read.

    Columns stand two blanks apart or more. Controllers (``Mcu``) have no logical number and are left out.
    """
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.expandtabs().splitlines() if line.strip()]
    header = next((cells for cells in lines if "NPU ID" in cells), None)
    if header is None:
        return {}, ()
    mapped: dict[tuple[int | None, int], Mapped] = {}
    faults: list[str] = []
    for cells in lines[lines.index(header) + 1 :]:
        row = dict(zip(header, cells, strict=False))
        if len(cells) != len(header) or _integer(row["NPU ID"]) is None:
            faults.append(f"npu-smi info -m has a row that cannot be read: {'  '.join(cells)[:120]}")
        elif row.get("Chip Name", "").lower() != "mcu" and row.get("Chip Logic ID") != "-":
            key = (_integer(row["NPU ID"]), _integer(row.get("Chip ID", "0")) or 0)
            numbers = (_integer(row.get("Chip Logic ID", "")), _integer(row.get("Chip Phy-ID", "")))
            mapped[key] = Mapped(logical_id=numbers[0], physical_id=numbers[1])
    return mapped, tuple(faults)


def parse_board(text: str) -> str:
    """Return the ``NPU Name`` in the output of ``npu-smi info -t board -i N -c M``, empty when it has none."""
    match = re.search(r"^\s*NPU Name\s*:\s*(\S+)\s*$", text, re.MULTILINE)
    return match[1] if match else ""


def _device_rows(text: str) -> Iterator[_Cells]:
    """Yield the cells of each row up to the table of processes. Rules and free text are no rows."""
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if "Process id" in line:
            return
        yield cells


def _split_header(rows: list[_Cells]) -> tuple[tuple[list[list[str]], list[list[str]]], list[_Cells]]:
    """Return the names in each cell of the two header rows, and the rows below; nothing without a header."""
    for place, cells in enumerate(rows[:-1]):
        names = [re.findall(_COLUMNS, cell) for cell in cells]
        flat = [name for cell in names for name in cell]
        if "Health" in flat and "NPU" in flat:
            return (names, [re.findall(_COLUMNS, cell) for cell in rows[place + 1]]), rows[place + 2 :]
    return ([], []), []


def _fields(header: list[list[str]], cells: _Cells) -> dict[str, str]:
    """Return the values of a row by column. The last column of a cell takes all that is left of it."""
    fields: dict[str, str] = {}
    for names, cell in zip(header, cells, strict=False):
        fields |= zip(names, cell.split(None, max(0, len(names) - 1)), strict=False)
    return fields


def _is_first(fields: Mapping[str, str]) -> bool:
    """Tell a chip's first row from its second, which has a bus id or ``NA`` where this has the health."""
    health = fields.get("Health", "")
    return _npu_id(fields) is not None and bool(fields.get("Name")) and health != "NA" and _bus_id(health) is None


def _npu_id(fields: Mapping[str, str]) -> int | None:
    return _integer(fields.get("NPU", ""))


def _chip(first: Mapping[str, str], second: Mapping[str, str]) -> Chip:
    used, total = _memory_mib(second)
    utilization = _number(second.get("AICore(%)", second.get("NPU Util(%)", "")))
    return Chip(
        npu_id=_npu_id(first),
        chip_id=_integer(second.get("Chip", "0")) or 0,
        logical_id=_integer(second.get("Device", "")),
        physical_id=_integer(second.get("Phy-ID", "")),
        name=first.get("Name", ""),
        health=_HEALTH.get(first.get("Health", "").lower(), Health.UNKNOWN),
        memory_bytes=total * MIB if total else None,
        used_bytes=used * MIB if total else None,
        bus_id=_bus_id(second.get("Bus-Id", "")),
        utilization=None if utilization is None else utilization / 100,
        temperature_c=_number(first.get("Temp(C)", "")),
        power_w=_number(first.get("Power(W)", "")),
    )


def _memory_mib(second: Mapping[str, str]) -> tuple[int, int]:
    """Return (used, total) of the device's own memory: the last pair, HBM where there is some (310P has none)."""
    pairs = [match for value in second.values() for match in _PAIR.finditer(value)]
    return (int(pairs[-1][1]), int(pairs[-1][2])) if pairs else (0, 0)


def _bus_id(text: str) -> str | None:
    match = re.search(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]", text)
    return match[0].upper() if match else None


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\d+", text.strip()) else None


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"-?\d+(?:\.\d+)?", text.strip()) else None
