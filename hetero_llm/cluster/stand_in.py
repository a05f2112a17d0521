"""Which engine serves a group: the kind's own, or on pretended devices the one that stands in for it.

Only an override (`hetero_llm.inventory.override`) can name a stand-in, and it marks its devices as simulated; without
one this always gives the real engine.
"""

from __future__ import annotations

from hetero_llm.errors import EngineFailed
from hetero_llm.plugin import Backend, EngineLaunch, EngineSpec
from hetero_llm.plugin.manager import PluginManager


def engine_launch(backend: Backend, plugins: PluginManager, spec: EngineSpec) -> EngineLaunch:
    """Return how to start the engine of `spec`. The backend's own `engine` runs in either case.

    Raises:
        EngineFailed: pretended and real devices are mixed, or the engine they name cannot stand in.
        UnknownKind: no plugin provides the engine they name.
    """
    launch = backend.engine(spec)
    named = {device.stand_in if device.simulated else None for device in spec.devices}
    if named == {None}:
        return launch
    if len(named) > 1:
        words = " and ".join(sorted(kind or "the kind's own" for kind in named))
        raise EngineFailed(f"the devices of one {backend.kind} group name different engines: {words}", next=_NEXT)
    (kind,) = named
    stand_in = plugins.backend(str(kind)).stand_in(launch, spec)
    if stand_in is None:
        raise EngineFailed(f"the engine of {kind} cannot stand in for the one of {backend.kind}", next=_NEXT)
    return stand_in


_NEXT = ("engine=sim in HETERO_LLM_OVERRIDE_<KIND>", "hetero-llm plugins list")
