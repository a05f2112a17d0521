"""What a simulated accelerator can do, read from YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import yaml

PROFILES_ENV = "HETERO_LLM_SIM_PROFILES"
BUILT_IN = Path(__file__).with_name("profiles.yaml")


class ProfileInvalid(ValueError):
    """A profiles file cannot be used; the message names file, profile and field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Speed and size of one simulated device.

    A step that decodes n sequences and computes p prompt tokens takes ``base_s + slope_s * n`` (if n > 0) plus
    ``p / prefill_tokens_per_s``.

    Attributes:
        base_s: inter-token time of an idle device, without the share of the sequences.
        slope_s: what each sequence of the batch adds to it.
        max_batch: sequences in one step.
        max_batched_tokens: tokens in one step, decoded and prompt together.
        kv_tokens: tokens the KV cache holds.
        block_tokens: tokens in one block of it.
        max_queued: requests that may wait before others are refused.
        memory_bytes: device memory, for the planner only.
    """

    prefill_tokens_per_s: float
    base_s: float
    slope_s: float
    max_batch: int
    max_batched_tokens: int
    kv_tokens: int
    block_tokens: int
    max_queued: int
    memory_bytes: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in ("base_s", "slope_s", "max_queued")):
                raise ValueError(f"{name} must be above 0, not {value}")
        if self.base_s + self.slope_s == 0:
            raise ValueError("base_s and slope_s are both 0: a token must take time")
        if self.max_batched_tokens < self.max_batch:
            raise ValueError(f"max_batched_tokens {self.max_batched_tokens} is below max_batch {self.max_batch}")
        if self.kv_tokens < self.block_tokens:
            raise ValueError(f"kv_tokens {self.kv_tokens} is less than one block of {self.block_tokens}")

    def of_group(self, tp: int, pp: int) -> Profile:
        """Return the profile of tp x pp such devices as one engine.

        As a roofline has it: every rank adds arithmetic and KV cache; only TP ranks shorten a token's time, since the
        stages of a pipeline work in turn.
        """
        ranks = tp * pp
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s * ranks,
            base_s=self.base_s / tp,
            slope_s=self.slope_s / tp,
            kv_tokens=self.kv_tokens * ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """All profiles by accelerator name, and the devices the files list for this machine."""

    by_name: Mapping[str, Profile]
    devices: tuple[Mapping[str, Any], ...]

    def find(self, name: str) -> Profile:
        """Return one profile.

        Raises:
            ProfileInvalid: there is none of that name.
        """
        if name not in self.by_name:
            raise ProfileInvalid(f"no profile {name!r}; there are {', '.join(sorted(self.by_name))}")
        return self.by_name[name]


def load_profiles(extra: str | None = None) -> Profiles:
    """Read the built-in profiles and, over them, those of the file `extra` (default: named by `PROFILES_ENV`).

    Raises:
        ProfileInvalid: a file cannot be read or a profile is not sound.
    """
    extra = os.environ.get(PROFILES_ENV, "").strip() if extra is None else extra
    raw: dict[str, Mapping[str, Any]] = {}
    found_in: dict[str, Path] = {}
    devices: list[Mapping[str, Any]] = []
    for path in (BUILT_IN, *((Path(extra),) if extra else ())):
        document = _document(path)
        for name, fields in _section(path, document, "profiles", dict).items():
            raw[str(name)] = _section(path, {name: fields}, name, dict)
            found_in[str(name)] = path
        devices = _section(path, document, "devices", list) or devices
    return Profiles(by_name={name: _profile(found_in[name], name, raw) for name in raw}, devices=tuple(devices))


def _document(path: Path) -> Mapping[str, Any]:
    try:
        document = yaml.safe_load(path.read_bytes()) or {}
    except OSError as error:
        raise ProfileInvalid(f"cannot read {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ProfileInvalid(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not document.keys() <= {"profiles", "devices"}:
        raise ProfileInvalid(f"{path} must hold 'profiles' and 'devices' only")
    return document


def _section(path: Path, document: Mapping[Any, Any], name: Any, kind: type) -> Any:
    section = document.get(name) or kind()
    if not isinstance(section, kind):
        raise ProfileInvalid(f"{path}: {name!r} must be a {kind.__name__}, not {type(section).__name__}")
    return section


def _profile(path: Path, name: str, raw: Mapping[str, Mapping[str, Any]]) -> Profile:
    fields, seen = dict(raw[name]), [name]
    while "like" in fields:
        parent = fields.pop("like")
        if parent in seen or parent not in raw:
            raise ProfileInvalid(f"{path}: profile {name!r} is like {parent!r}, which is itself or not there")
        seen.append(parent)
        fields = {**raw[parent], **fields}
    try:
        return msgspec.convert(fields, _Strict).profile()
    except (ValueError, msgspec.ValidationError) as error:
        raise ProfileInvalid(f"{path}: profile {name!r}: {error}") from error


class _Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The same fields as `Profile`, for reading: an unknown key is a typing error, not something to ignore."""

    prefill_tokens_per_s: float
    base_s: float
    slope_s: float
    max_batch: int
    max_batched_tokens: int
    kv_tokens: int
    block_tokens: int
    max_queued: int
    memory_bytes: int

    def profile(self) -> Profile:
        return Profile(**msgspec.structs.asdict(self))
