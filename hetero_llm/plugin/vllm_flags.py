"""The part of vLLM's command line and environment that is the same on every kind of device.

Flag names are those of ``vllm serve`` 0.18 to 0.33. A kind puts its own flags behind `serve_flags` and ends with
`user_flags`: argparse lets the last of equal flags win, and that must be the user's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero_llm.model import Device
from hetero_llm.plugin.engine import EngineSpec
from hetero_llm.plugin.flags import engine_flags
from hetero_llm.plugin.interfaces import address_towards, interface_of

LOOPBACK = "127.0.0.1"

STALE_ENVS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK_TABLE_FILE",
    "VLLM_USE_V1",
)
"""Variables left over from another launcher that would make an engine join the wrong group or refuse to start."""


def serve_flags(spec: EngineSpec) -> tuple[str, ...]:
    """Return address, served name, parallel sizes, executor, context length, dtype, and the flags of several nodes."""
    return (
        *("--host", spec.host, "--port", str(spec.port)),
        *("--served-model-name", spec.served_name),
        *("--tensor-parallel-size", str(spec.tp), "--pipeline-parallel-size", str(spec.pp)),
        # Left unset, vLLM picks ray inside a placement group, and then waits for devices this replica already holds.
        *("--distributed-executor-backend", "mp"),
        *("--max-model-len", str(spec.max_model_len), "--dtype", spec.dtype),
        *node_flags(spec),
    )


def node_flags(spec: EngineSpec) -> tuple[str, ...]:
    """Return the flags of a group over several nodes, none for one node. Nodes behind the first serve no HTTP."""
    if spec.node_count == 1:
        return ()
    flags = ("--nnodes", str(spec.node_count), "--node-rank", str(spec.node_rank))
    master = ("--master-addr", str(spec.master_address), "--master-port", str(spec.master_port))
    return (*flags, *master, *(("--headless",) if spec.node_rank > 0 else ()))


def user_flags(spec: EngineSpec) -> tuple[str, ...]:
    """Return the flags of the configuration, then those of the command line; they go last and so win."""
    return (*engine_flags(spec.options), *spec.extra_args)


def local_devices(spec: EngineSpec) -> tuple[Device, ...]:
    """Return the devices of this node's ranks: ranks fill the nodes evenly, in order."""
    per_node = spec.tp * spec.pp // spec.node_count
    start = spec.node_rank * per_node
    return spec.devices[start : start + per_node] if len(spec.devices) > per_node else spec.devices


def own_address(spec: EngineSpec) -> str | None:
    """Return the address this node's ranks meet the others at: loopback for one node, else the way to node rank 0.

    None when there is no route to node rank 0.
    """
    return LOOPBACK if spec.node_count == 1 else address_towards(spec.master_address or "")


def serve_env(spec: EngineSpec) -> dict[str, str]:
    """Return the variables of a quiet engine: no usage report, plain log, no hub access for a local model."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_COLOR": "0",
        "NO_COLOR": "1",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if Path(spec.model_path).is_dir():
        env |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    address = own_address(spec)
    # Left unset, vLLM takes the address of the default route, which may be another network or none at all.
    return env | ({"VLLM_HOST_IP": address} if address else {})


def interface_env(spec: EngineSpec, *names: str) -> Mapping[str, str]:
    """Return each variable of `names` set to the interface this node's ranks meet the others on; empty without one."""
    interface = interface_of(own_address(spec) or "")
    return dict.fromkeys(names, interface) if interface else {}
