"""Facts from ``npu-smi``: which programs to run, and how their answers become chips. The tables are read elsewhere.

Its exit status says nothing and its errors come on standard output, so only the text counts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import replace

from hetero_llm.plugin import bounded
from hetero_llm_ascend import codes
from hetero_llm_ascend.chip import Chip, Failure, Reading, accelerator_name
from hetero_llm_ascend.npu_smi_table import Mapped, parse_board, parse_info, parse_map

SOURCE = "npu-smi"
TOOL = "npu-smi"
_NONE = "There is no NPU card"
_USUAL_PLACES = "/usr/local/bin:/usr/local/sbin:/usr/bin:/usr/sbin"


class ToolFailed(Exception):
    """The tool could not be run, or did not end in time; the text is one line."""


def tool_path(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the tool's path, None when it is not installed: services often run without /usr/local in their PATH."""
    return shutil.which(TOOL, path=f"{environ.get('PATH', '')}:{_USUAL_PLACES}")


def read(deadline_s: float) -> Reading:
    """Return the chips npu-smi lists. Runs it two or three times, within `deadline_s` together."""
    tool = tool_path()
    if tool is None:
        return Reading(source=SOURCE, failure=Failure(text="npu-smi is not installed", missing=True))
    deadline = time.monotonic() + deadline_s
    try:
        text = run(tool, ("info",), deadline)
    except ToolFailed as error:
        return Reading(source=SOURCE, failure=Failure(text=str(error), next=("npu-smi info",)))
    return _read_rest(tool, text, deadline)


def run(tool: str, arguments: tuple[str, ...], deadline: float) -> str:
    """Return what the tool prints on standard output, in English.

    Raises:
        ToolFailed: it cannot be started, or is still running at `deadline` (of `time.monotonic`).
    """
    command = " ".join((TOOL, *arguments))
    timeout_s = max(0.1, deadline - time.monotonic())
    try:
        done = bounded.run((tool, *arguments), {**os.environ, "LC_ALL": "C"}, timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ToolFailed(f"{command} did not end within {timeout_s:.1f} s") from error
    except OSError as error:
        raise ToolFailed(f"{command} cannot be run: {error.strerror or error}") from error
    return done.stdout.decode(errors="replace")


def _read_rest(tool: str, text: str, deadline: float) -> Reading:
    chips, faults = parse_info(text)
    if not chips:
        return Reading(source=SOURCE, faults=faults, failure=_failure(text))
    mapped, unread = _mapped(tool, deadline)
    named, unnamed = _with_second_name(chips, tool, deadline)
    return Reading(source=SOURCE, chips=_numbered(named, mapped), faults=(*faults, *unread, *unnamed))


def _mapped(tool: str, deadline: float) -> tuple[Mapping[tuple[int | None, int], Mapped], tuple[str, ...]]:
    try:
        mapped, faults = parse_map(run(tool, ("info", "-m"), deadline))
    except ToolFailed as error:
        return {}, (f"the logical numbers are those of the list's order, because {error}",)
    if mapped or faults:
        return mapped, faults
    return {}, ("the logical numbers are those of the list's order, because npu-smi info -m names no chip",)


def _with_second_name(chips: tuple[Chip, ...], tool: str, deadline: float) -> tuple[tuple[Chip, ...], tuple[str, ...]]:
    """Return the chips, those only called ``Ascend910`` with the second name that tells the A3 parts apart.

    One card is asked for all: a server carries one part.
    """
    short = [chip for chip in chips if accelerator_name(chip.name) == "910"]
    if not short:
        return chips, ()
    where = ("-i", str(short[0].npu_id), "-c", str(short[0].chip_id))
    try:
        name = parse_board(run(tool, ("info", "-t", "board", *where), deadline))
    except ToolFailed as error:
        return chips, (f"the exact type of the accelerators is not known, because {error}",)
    return tuple(replace(chip, npu_name=name) if chip in short else chip for chip in chips), ()


def _numbered(chips: tuple[Chip, ...], mapped: Mapping[tuple[int | None, int], Mapped]) -> tuple[Chip, ...]:
    """Return the chips with their logical and physical numbers.

    With a map, a chip that is not in it gets no logical number: the runtime does not count it. Without one the number
    in the table itself counts (310P), else the place in the list: npu-smi lists chips in the runtime's order.
    """
    physical = tuple(_with_physical_id(chip, mapped.get((chip.npu_id, chip.chip_id))) for chip in chips)
    if any(row.logical_id is not None for row in mapped.values()):
        return tuple(_with_logical_id(chip, mapped.get((chip.npu_id, chip.chip_id))) for chip in physical)
    if any(chip.logical_id is not None for chip in physical):
        return physical
    return tuple(replace(chip, logical_id=place) for place, chip in enumerate(physical))


def _with_physical_id(chip: Chip, row: Mapped | None) -> Chip:
    return chip if row is None or row.physical_id is None else replace(chip, physical_id=row.physical_id)


def _with_logical_id(chip: Chip, row: Mapped | None) -> Chip:
    return replace(chip, logical_id=None if row is None else row.logical_id)


def _failure(text: str) -> Failure | None:
    """Return why the listing has no chip; None when the tool says that there is none."""
    if _NONE.lower() in text.lower():
        return None
    code = codes.code_in(text)
    if code is not None:
        return Failure(text=f"npu-smi info says: {codes.words(code)}", next=codes.steps(code))
    said = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return Failure(text=f"npu-smi info printed no table: {said[:200]}", next=("npu-smi info",))
