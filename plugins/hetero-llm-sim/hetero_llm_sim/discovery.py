"""Simulated devices of this machine: what the environment or a profiles file lists. Nothing listed is no device."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hetero_llm.plugin import Device, Discovery, Health, Problem
from hetero_llm_sim.profile import PROFILES_ENV, Profile, ProfileInvalid, load_profiles

KIND = "sim"
DEVICES_ENV = "HETERO_LLM_SIM_DEVICES"
NODE_ENV = "HETERO_LLM_SIM_NODE"
_DISCOVERY_FAILED = "HL203"
_EXAMPLE = f'{DEVICES_ENV}="fast=1,mid=2,slow:failed=1"'
_ENTRY = re.compile(r"([A-Za-z0-9._-]{1,63})(?::([a-z]+))?(?:=(\d{1,4}))?")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A number of like devices."""

    accelerator: str
    count: int = 1
    health: Health = Health.OK


def discover(environ: Mapping[str, str] = os.environ) -> Discovery:
    """Return the devices listed in `DEVICES_ENV`, else those of the profiles file; never raises.

    An entry that cannot be read, or whose profile is missing, is one problem; the others keep their numbers.
    """
    source = DEVICES_ENV if DEVICES_ENV in environ else environ.get(PROFILES_ENV) or "profiles.yaml"
    try:
        profiles = load_profiles(environ.get(PROFILES_ENV, "").strip())
    except ProfileInvalid as error:
        return Discovery(problems=(_problem(str(error), f"correct or unset {PROFILES_ENV}"),), source=source)
    problems: list[Problem] = []
    wanted = _from_env(environ[DEVICES_ENV], problems) if DEVICES_ENV in environ else _from_file(profiles, problems)
    node = re.sub(r"[^A-Za-z0-9._-]", "-", environ.get(NODE_ENV) or socket.gethostname())
    devices: list[Device] = []
    number = 0
    for entry in wanted:
        profile = profiles.by_name.get(entry.accelerator)
        if profile is None:
            names = ", ".join(sorted(profiles.by_name))
            problems.append(_problem(f"no profile {entry.accelerator!r}; there are {names}", _EXAMPLE))
        else:
            devices += (_device(node, number + offset, entry, profile) for offset in range(entry.count))
        # What cannot be had still takes its numbers, as a dead card keeps its slot.
        number += entry.count
    return Discovery(devices=tuple(devices), problems=tuple(problems), source=source)


def _device(node: str, index: int, wanted: Wanted, profile: Profile) -> Device:
    return Device(
        kind=KIND,
        accelerator=wanted.accelerator,
        uid=f"sim-{node}-{index}",
        index=index,
        memory_bytes=profile.memory_bytes,
        free_bytes=profile.memory_bytes,
        health=wanted.health,
        simulated=True,
    )


def _from_env(text: str, problems: list[Problem]) -> list[Wanted]:
    wanted: list[Wanted] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(part)
        if match is None or (match[2] or "ok") not in tuple(Health):
            problems.append(_problem(f"{part!r} in {DEVICES_ENV} is not TYPE[:HEALTH][=COUNT]", _EXAMPLE))
        else:
            wanted.append(Wanted(match[1], int(match[3] or 1), Health(match[2] or "ok")))
    return wanted


def _from_file(profiles: Any, problems: list[Problem]) -> Iterable[Wanted]:
    for entry in profiles.devices:
        try:
            yield Wanted(str(entry["type"]), int(entry.get("count", 1)), Health(entry.get("health", "ok")))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"{entry!r} in the devices of {os.environ.get(PROFILES_ENV)} cannot be read: {error}"
            problems.append(_problem(text, "devices: [{type: fast, count: 2}]"))


def _problem(text: str, advice: str) -> Problem:
    return Problem(kind=KIND, code=_DISCOVERY_FAILED, text=text, next=(advice,))
