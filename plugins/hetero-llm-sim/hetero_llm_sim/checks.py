"""What `hetero-llm doctor sim` looks at: that the lists can be read, and that nobody forgets faults that are on."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hetero_llm.plugin import Check
from hetero_llm_sim import discovery
from hetero_llm_sim.faults import FAULTS_ENV, FaultsInvalid, parse_faults
from hetero_llm_sim.profile import PROFILES_ENV, ProfileInvalid, load_profiles


def doctor(environ: Mapping[str, str] = os.environ) -> tuple[Check, ...]:
    """Return all checks."""
    return (profiles(environ), devices(environ), faults(environ))


def profiles(environ: Mapping[str, str]) -> Check:
    """Check that the profiles can be read."""
    try:
        found = load_profiles(environ.get(PROFILES_ENV, "").strip())
    except ProfileInvalid as error:
        advice = f"correct or unset {PROFILES_ENV}"
        return Check(name="sim.profiles", ok=False, text=str(error), next=(advice,))
    return Check(name="sim.profiles", ok=True, text=f"profiles: {', '.join(sorted(found.by_name))}")


def devices(environ: Mapping[str, str]) -> Check:
    """Check that the list of devices can be read; an empty one is as it should be."""
    found = discovery.discover(environ)
    if found.problems:
        first = found.problems[0]
        return Check(name="sim.devices", ok=False, text=first.text, next=first.next)
    return Check(name="sim.devices", ok=True, text=f"{len(found.devices)} simulated devices from {found.source}")


def faults(environ: Mapping[str, str]) -> Check:
    """Check that no engine would start with faults."""
    line = environ.get(FAULTS_ENV, "")
    try:
        on = parse_faults(line).active
    except FaultsInvalid as error:
        return Check(name="sim.faults", ok=False, text=str(error), next=(f"correct or unset {FAULTS_ENV}",))
    if on:
        text = f"engines start with faults: {line}"
        return Check(name="sim.faults", ok=None, text=text, next=(f"unset {FAULTS_ENV}",))
    return Check(name="sim.faults", ok=True, text="engines start without faults")
