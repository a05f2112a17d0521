"""What is known about accelerators: `hardware_matrix.yaml`, checked and ready to ask.

The planner takes memory and bandwidth from it, doctor compares versions with it, the README's table is made from it.
Every row says where its numbers come from; a row without evidence is refused when the file is loaded. The rows are
msgspec structs instead of dataclasses because those refuse keys that do not exist.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from datetime import date
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import yaml

from hetero_llm.errors import MatrixInvalid

FILE = "hardware_matrix.yaml"
SCHEMA = 1
_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._-]{1,63}$")]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[int, msgspec.Meta(gt=0)]


class Level(StrEnum):
    """How well a claim is founded: a test of ours ran it, the vendor wrote it, or somebody else said so."""

    VERIFIED = "verified"
    DOCUMENTED = "documented"
    REPORTED = "reported"


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a row comes from: a test id of this repository or the title of a document, the date, the level."""

    source: _Text
    date: date
    level: Level


class Interconnect(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What links the devices of a node; `bytes_per_s` is one device's total, None when not known."""

    name: _Text
    bytes_per_s: _Positive | None = None


class VersionSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Versions that work together, and how that is known. None: not part of this set."""

    driver: str | None = None
    toolkit: str | None = None
    torch: str | None = None
    vllm: str | None = None
    plugin: str | None = None
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(min_length=1)]


class AcceleratorEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator of one kind. None means *not known*, never zero.

    Attributes:
        names: what vendor tools call it.
        memory_bytes: of one device; None where it belongs to the machine.
        memory_bandwidth_bytes_per_s: peak of one device.
        bf16_flops, fp16_flops, fp8_flops: dense peak of one device, operations per second.
        native_resource: Ray resource that hands out its ids.
        visible_devices_env: variable that the vendor's runtime reads.
        pairing: devices that must be allocated together, ``card`` for the dies of one card; None when free.
        collective: torch.distributed backend.
        dtypes: torch dtype names the engine can compute in.
        features: ``eager``, ``graph``, ``tp``, ``pp``; what is not listed does not work.
    """

    kind: _Name
    accelerator: _Name
    vendor: _Text
    names: tuple[str, ...] = ()
    memory_bytes: _Positive | None = None
    memory_bandwidth_bytes_per_s: _Positive | None = None
    bf16_flops: _Positive | None = None
    fp16_flops: _Positive | None = None
    fp8_flops: _Positive | None = None
    interconnect: Interconnect | None = None
    native_resource: str | None = None
    visible_devices_env: str | None = None
    pairing: str | None = None
    collective: _Text
    dtypes: tuple[str, ...]
    features: tuple[str, ...]
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(min_length=1)]
    versions: tuple[VersionSet, ...] = ()


class _Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    accelerators: tuple[AcceleratorEntry, ...]


class Matrix:
    """All entries, found by kind and accelerator."""

    def __init__(self, entries: tuple[AcceleratorEntry, ...]) -> None:
        self.entries = entries
        self._by_name = _index(entries)

    def find(self, kind: str, accelerator: str) -> AcceleratorEntry | None:
        """Return the entry of an accelerator or of a name vendor tools give it; case does not matter.

        None when it is not listed, which is allowed: an unknown accelerator works, only without estimates.
        """
        return self._by_name.get((kind, accelerator.lower()))


def _index(entries: tuple[AcceleratorEntry, ...]) -> Mapping[tuple[str, str], AcceleratorEntry]:
    index: dict[tuple[str, str], AcceleratorEntry] = {}
    for entry in entries:
        for name in dict.fromkeys(name.lower() for name in (entry.accelerator, *entry.names)):
            if (entry.kind, name) in index:
                raise MatrixInvalid(f"{FILE}: {entry.kind} {name!r} is listed twice")
            index[entry.kind, name] = entry
    return index


def parse_matrix(text: str) -> Matrix:
    """Return the matrix written in `text`.

    Raises:
        MatrixInvalid: not YAML, a key that does not exist, a value of the wrong type, or a row without evidence.
    """
    try:
        document = msgspec.convert(yaml.safe_load(text), _Document)
    except yaml.YAMLError as error:
        raise MatrixInvalid(f"{FILE} is not YAML", cause=" ".join(str(error).split())) from error
    except msgspec.ValidationError as error:
        raise MatrixInvalid(f"{FILE} is not in the documented shape", cause=str(error)) from error
    if document.schema != SCHEMA:
        raise MatrixInvalid(f"{FILE} has schema {document.schema}, this hetero-llm reads {SCHEMA}")
    return Matrix(document.accelerators)


@cache
def load_matrix() -> Matrix:
    """Return the matrix this installation came with.

    Raises:
        MatrixInvalid: the file is missing or not in the documented shape.
    """
    packed = importlib.resources.files("hetero_llm") / FILE
    # An editable install reads the repository, where the file lies beside the package.
    beside = Path(__file__).parent.parent / FILE
    source = packed if packed.is_file() else beside
    try:
        return parse_matrix(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise MatrixInvalid(f"{FILE} cannot be read", cause=str(error)) from error
