"""The data behind the gateway's own routes, built from the routing table and from nothing else: no engine is asked."""

from __future__ import annotations

import os
from typing import Any

from hetero_llm.gateway.state import GatewayState
from hetero_llm.model import SCHEMA_VERSION, ModelEntry, ReplicaState, RoutingTable, to_data


def model_list(table: RoutingTable) -> dict[str, Any]:
    """Return OpenAI's list of models, one entry per pool, with state and kinds in `hetero`."""
    return {"object": "list", "data": [model_card(entry, table) for entry in table.models]}


def model_card(entry: ModelEntry, table: RoutingTable) -> dict[str, Any]:
    """Return OpenAI's description of one model."""
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created_unix_s,
        "owned_by": "hetero-llm",
        "root": entry.source,
        "max_model_len": entry.max_model_len,
        "hetero": model_state(entry, table),
    }


def model_state(entry: ModelEntry, table: RoutingTable) -> dict[str, Any]:
    """Return whether a model can be used, its replicas counted by kind and by state, and how many are simulated."""
    ready: dict[str, int] = dict.fromkeys(entry.kinds, 0)
    for target in table.targets:
        if target.model == entry.name:
            ready[target.kind] = ready.get(target.kind, 0) + 1
    states: dict[str, int] = {}
    for replica in table.replicas:
        if replica.model == entry.name:
            states[replica.state.value] = states.get(replica.state.value, 0) + 1
    return {
        "state": _word(sum(ready.values()), states),
        "ready_by_kind": ready,
        "replicas_by_state": states,
        "simulated_replicas": sum(r.simulated for r in table.replicas if r.model == entry.name),
    }


def _word(ready: int, states: dict[str, int]) -> str:
    if ready:
        return "ready"
    if states.get(ReplicaState.STARTING.value):
        return "starting"
    return "failed" if states.get(ReplicaState.FAILED.value) else "unavailable"


def readiness(table: RoutingTable) -> dict[str, Any]:
    """Return what ``/ready`` says: ready when at least one replica is."""
    return {
        "ready": bool(table.targets),
        "models": {entry.name: model_state(entry, table)["state"] for entry in table.models},
    }


def status(state: GatewayState) -> dict[str, Any]:
    """Return what ``/status`` says."""
    return {
        "schema": SCHEMA_VERSION,
        "data": {
            "version": state.table.version,
            "models": [model_card(entry, state.table) for entry in state.table.models],
            "replicas": to_data(state.table.replicas),
            "gateway": {
                "pid": os.getpid(),
                "uptime_s": round(state.clock() - state.started_s, 1),
                "draining": state.draining,
                "in_flight": dict(state.router.in_flight()),
                "client_connections": state.metrics.clients,
            },
        },
    }
