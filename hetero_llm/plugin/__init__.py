"""The plugin API: the only package of hetero-llm that a backend imports. Versioned by `API_VERSION`."""

from hetero_llm.errors import EngineUnfit
from hetero_llm.model import Device, Health, ModelFacts, PoolWish, Problem, Rejection
from hetero_llm.plugin.backend import API_VERSION, Backend, Check, DeviceUsage, Discovery
from hetero_llm.plugin.engine import SHM_PREFIX_ENV, EngineFact, EngineLaunch, EngineSpec, PhaseMarker, RootCausePattern
from hetero_llm.plugin.group import GroupSetup, GroupSpec, RankSpec
from hetero_llm.plugin.hookspecs import hookimpl

__all__ = [
    "API_VERSION",
    "SHM_PREFIX_ENV",
    "Backend",
    "Check",
    "Device",
    "DeviceUsage",
    "Discovery",
    "EngineFact",
    "EngineLaunch",
    "EngineSpec",
    "EngineUnfit",
    "GroupSetup",
    "GroupSpec",
    "Health",
    "ModelFacts",
    "PhaseMarker",
    "PoolWish",
    "Problem",
    "RankSpec",
    "Rejection",
    "RootCausePattern",
    "hookimpl",
]
