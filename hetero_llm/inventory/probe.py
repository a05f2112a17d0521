"""Ask each backend for its devices in a process of its own, with a deadline.

A backend that hangs or crashes ends as a `Problem`, and the other kinds answer as if nothing had been. The child is
this module, run with ``python -m``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from hetero_llm.errors import DiscoveryFailed, DiscoveryTimedOut
from hetero_llm.inventory.asking import Said, answer_stream, ask
from hetero_llm.model import Problem, to_data
from hetero_llm.plugin import Discovery
from hetero_llm.plugin.manager import load_plugins

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What one backend answered: its devices and, as far as known, the versions of its software."""

    discovery: Discovery
    versions: Mapping[str, str | None] = field(default_factory=dict)


def probe_kinds(
    kinds: Iterable[str],
    deadline_s: float = DEADLINE_S,
    environ: Mapping[str, str] = os.environ,
    stopped: threading.Event | None = None,
) -> dict[str, Probe]:
    """Probe all `kinds` at the same time, with `environ`; the deadline holds for each from the common start.

    Never raises for what a backend does: a time-out or a crash is one problem (HL202, HL203) and no device. Once
    `stopped` is set, or when this is interrupted, every child is killed with all it started.
    """
    programs = {kind: (sys.executable, "-m", "hetero_llm.inventory.probe", kind) for kind in kinds}
    return {kind: _probe(kind, said, deadline_s) for kind, said in ask(programs, deadline_s, environ, stopped).items()}


def _probe(kind: str, said: Said, deadline_s: float) -> Probe:
    try:
        probe = said.answer(Probe, deadline_s)
    except TimeoutError as error:
        return _problem(kind, DiscoveryTimedOut.code, f"discovery of {kind!r} {error}")
    except ValueError as error:
        return _problem(kind, DiscoveryFailed.code, f"discovery of {kind!r} failed: {error}")
    if any(device.stand_in for device in probe.discovery.devices):
        # Only an override, which the user wrote, may put another engine in the place of a kind's own.
        text = f"discovery of {kind!r} names a stand-in engine, which only an override may do"
        return _problem(kind, DiscoveryFailed.code, text)
    return probe


def _problem(kind: str, code: str, text: str) -> Probe:
    problem = Problem(kind=kind, code=code, text=text, next=(f"hetero-llm doctor {kind}",))
    return Probe(discovery=Discovery(problems=(problem,)))


def main(kind: str) -> None:
    """Print the `Probe` of `kind` as JSON."""
    with answer_stream() as answer:
        backend = load_plugins().backend(kind)
        probe = Probe(discovery=backend.discover(), versions=dict(backend.versions()))
        answer.write(msgspec.json.encode(to_data(probe)))


if __name__ == "__main__":
    main(sys.argv[1])
