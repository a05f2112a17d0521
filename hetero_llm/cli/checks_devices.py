"""The doctor's checks of what discovery found: present or unusable, known to the hardware matrix, versions that fit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hetero_llm.cli.checks_software import release
from hetero_llm.cli.render import size
from hetero_llm.matrix import AcceleratorEntry, Matrix, VersionSet
from hetero_llm.model import Device, Health, NodeInventory
from hetero_llm.plugin import Check

MEMORY_TOLERANCE = 0.15
"""Drivers keep a share for themselves and ECC; a device of another size differs by more."""

COMPARED = ("vllm", "plugin", "torch", "toolkit")


def device_checks(nodes: Sequence[NodeInventory], kinds: Sequence[str], matrix: Matrix) -> tuple[Check, ...]:
    """Return the checks of this machine's nodes.

    Args:
        kinds: kinds that were asked for by name; one that is absent is said to be so. A kind nobody asked for that is
            absent is not mentioned at all.
    """
    checks: list[Check] = []
    for node in nodes:
        if kinds and node.kind not in kinds:
            continue
        checks += [check_discovery(node), *check_matrix(node, matrix), *check_versions(node, matrix)]
    present = {node.kind for node in nodes}
    absent = [kind for kind in kinds if kind not in present]
    return (*checks, *(Check(name=f"{kind}.discovery", ok=None, text="no such device here") for kind in absent))


def check_discovery(node: NodeInventory) -> Check:
    """Return whether the devices of a kind can be used: hardware that is there but unusable fails, with the reason."""
    name = f"{node.kind}.discovery"
    reasons = "; ".join(problem.text for problem in node.problems)
    advice = tuple(dict.fromkeys(step for problem in node.problems for step in problem.next))
    if not node.devices:
        return Check(name=name, ok=False, text=f"present, unusable: {reasons or 'no reason given'}", next=advice)
    text = "; ".join(filter(None, (_counted(node.devices), reasons)))
    health = {device.health for device in node.devices}
    if node.problems or Health.FAILED in health:
        return Check(name=name, ok=False, text=text, next=advice or ("look at the devices: hetero-llm devices",))
    return Check(name=name, ok=True if health == {Health.OK} else None, text=text)


def _counted(devices: Iterable[Device]) -> str:
    groups = Counter((d.accelerator, str(d.health), " (simulated)" if d.simulated else "") for d in devices)
    return ", ".join(f"{count} x {name} {health}{note}" for (name, health, note), count in sorted(groups.items()))


def check_matrix(node: NodeInventory, matrix: Matrix) -> tuple[Check, ...]:
    """Return what the hardware matrix says of a node's accelerators. One that is not listed is a note, no failure."""
    if not node.devices:
        return ()
    notes: list[str] = []
    known: list[str] = []
    for accelerator in dict.fromkeys(device.accelerator for device in node.devices):
        entry = matrix.find(node.kind, accelerator)
        if entry is None:
            notes.append(f"{accelerator} is not listed: it works, without speed estimates and rules of its own")
            continue
        known.append(accelerator)
        notes += _odd_memory(entry, [device for device in node.devices if device.accelerator == accelerator])
    text = "; ".join((*notes, *([f"listed: {', '.join(known)}"] if known else ())))
    advice = ("the rows are in hardware_matrix.yaml",) if notes else ()
    return (Check(name=f"{node.kind}.matrix", ok=None if notes else True, text=text, next=advice),)


def _odd_memory(entry: AcceleratorEntry, devices: Iterable[Device]) -> list[str]:
    if entry.memory_bytes is None:
        return []
    listed = entry.memory_bytes
    sizes = Counter(device.memory_bytes for device in devices if device.memory_bytes is not None)
    return [
        f"{count} x {entry.accelerator} with {size(found)}, listed with {size(listed)}"
        for found, count in sizes.items()
        if abs(found - listed) > MEMORY_TOLERANCE * listed
    ]


def check_versions(node: NodeInventory, matrix: Matrix) -> tuple[Check, ...]:
    """Return whether the node's software is a set the matrix knows to fit together; another one is a note."""
    entries = (matrix.find(node.kind, device.accelerator) for device in node.devices)
    sets = tuple(dict.fromkeys(known for entry in entries if entry is not None for known in entry.versions))
    if not sets:
        return ()
    name = f"{node.kind}.versions"
    found = {key: value for key in COMPARED if (value := node.versions.get(key)) is not None}
    if "vllm" not in found:
        text = f"no vLLM found; known to fit: {'; '.join(_words(_parts(known)) for known in sets)}"
        return (Check(name=name, ok=None, text=text),)
    nearest = min(sets, key=lambda known: len(_differing(known, found)))
    differing = _differing(nearest, found)
    if not differing:
        levels = " and ".join(dict.fromkeys(str(claim.level) for claim in nearest.evidence))
        return (Check(name=name, ok=True, text=f"{_words(found)}: known to fit ({levels})"),)
    text = f"{_words(found)} is no set of the matrix; nearest: {_words(_parts(nearest))}"
    advice = tuple(f"{key} {_parts(nearest)[key]} instead of {found[key]}" for key in differing)
    return (Check(name=name, ok=None, text=text, next=advice),)


def _parts(known: VersionSet) -> dict[str, str]:
    parts = {"vllm": known.vllm, "plugin": known.plugin, "torch": known.torch, "toolkit": known.toolkit}
    return {key: value for key, value in parts.items() if value is not None}


def _differing(known: VersionSet, found: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(key for key, value in _parts(known).items() if key in found and not _same(value, found[key]))


def _same(listed: str, found: str) -> bool:
    """Tell whether `found` is the listed version or a post-release of it; a local part counts where one is listed."""
    return listed == found or ("+" not in listed and release(listed) == release(found))


def _words(parts: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in parts.items())


def check_visible_devices(environ: Mapping[str, str], variables: Iterable[str]) -> Check:
    """Return whether the variables that choose visible devices can be read as they were meant.

    Vendors' runtimes stop at the first entry they do not understand, without a word.

    Args:
        variables: names of the variables of the loaded backends.
    """
    values = {name: environ[name] for name in variables if name in environ}
    wrong = {name: faults for name, value in values.items() if (faults := visible_devices_faults(name, value))}
    if wrong:
        text = "; ".join(f"{name}={values[name]!r} {' and '.join(faults)}" for name, faults in wrong.items())
        advice = tuple(f"unset {name}, or list devices like {name}=0,1" for name in wrong)
        return Check(name="visible-devices", ok=False, text=text, next=advice)
    if hidden := [name for name, value in values.items() if not value]:
        text = f"{', '.join(hidden)} is set and empty: every device is hidden"
        return Check(name="visible-devices", ok=None, text=text, next=(f"unset {' '.join(hidden)}",))
    text = ", ".join(f"{name}={value}" for name, value in values.items())
    return Check(name="visible-devices", ok=True, text=text or "no variable hides a device")


def visible_devices_faults(name: str, value: str) -> tuple[str, ...]:
    """Return what is wrong with the value of such a variable; empty when nothing is.

    Ascend's runtime takes ascending numbers only (seen with torch_npu: ``6,4`` is no device, ``0, 1`` is one, ``0-3``
    is one); NVIDIA's takes numbers or ids (``GPU-…``, ``MIG-…``) and no device twice.
    """
    if not value:
        return ()
    parts = value.split(",")
    numbers = [int(part) for part in parts if re.fullmatch(r"[0-9]+", part)]
    faults = []
    if any(part != part.strip() for part in parts):
        faults.append("has blanks")
    if any(not part.strip() for part in parts):
        faults.append("has an empty entry")
    if any(re.fullmatch(r"\s*[0-9]+\s*-\s*[0-9]+\s*", part) for part in parts):
        faults.append("has a range")
    if twice := [part for part, count in Counter(parts).items() if part and count > 1]:
        faults.append(f"names {twice[0]} twice")
    if name.startswith("ASCEND_"):
        if numbers != sorted(numbers):
            faults.append("is not ascending")
        if any(re.fullmatch(r"[0-9 -]*", part) is None for part in parts):
            faults.append("has something that is no number")
    return tuple(faults)
