"""What all kinds share of vLLM's command line and environment, and how an address finds its interface."""

from __future__ import annotations

import socket

import psutil
import pytest

from hetero_llm.plugin import Device, EngineSpec, vllm_flags
from hetero_llm.plugin.interfaces import address_towards, interface_of


def spec(**changes: object) -> EngineSpec:
    devices = tuple(Device(kind="x", accelerator="x", uid=f"x{n}", index=n) for n in range(4))
    settings = {
        "model_path": "/models/toy",
        "served_name": "toy",
        "devices": devices,
        "tp": 2,
        "pp": 2,
        "host": "127.0.0.1",
        "port": 4000,
        "max_model_len": 2048,
    }
    return EngineSpec(**{**settings, **changes})


def over_nodes(rank: int, master: str = "127.0.0.1") -> EngineSpec:
    return spec(node_count=2, node_rank=rank, master_address=master, master_port=5000)


def own_addresses() -> list[str]:
    """Return this machine's IPv4 addresses other than loopback."""
    found = [a.address for addresses in psutil.net_if_addrs().values() for a in addresses if a.family == socket.AF_INET]
    return [address for address in found if not address.startswith("127.")]


def test_one_node_has_no_flags_of_nodes() -> None:
    assert vllm_flags.node_flags(spec()) == ()


def test_only_the_nodes_behind_the_first_are_headless() -> None:
    assert "--headless" not in vllm_flags.node_flags(over_nodes(0))
    assert vllm_flags.node_flags(over_nodes(1))[-1] == "--headless"


def test_ranks_fill_the_nodes_evenly_in_order() -> None:
    assert [d.index for d in vllm_flags.local_devices(over_nodes(0))] == [0, 1]
    assert [d.index for d in vllm_flags.local_devices(over_nodes(1))] == [2, 3]
    assert len(vllm_flags.local_devices(spec())) == 4


def test_settings_of_the_configuration_come_before_those_of_the_command_line() -> None:
    flags = vllm_flags.user_flags(spec(options={"max_num_seqs": 8}, extra_args=("--max-num-seqs", "4")))
    assert flags == ("--max-num-seqs", "8", "--max-num-seqs", "4")


def test_one_node_meets_on_loopback() -> None:
    assert vllm_flags.serve_env(spec())["VLLM_HOST_IP"] == "127.0.0.1"
    assert vllm_flags.interface_env(spec(), "A", "B") == {"A": "lo", "B": "lo"}


@pytest.mark.parametrize("rank", [0, 1])
def test_over_nodes_each_meets_on_its_own_address_towards_the_first(rank: int) -> None:
    addresses = own_addresses()
    if not addresses:
        pytest.skip("this machine has no address other than loopback")
    env = vllm_flags.serve_env(over_nodes(rank, addresses[0]))
    assert env["VLLM_HOST_IP"] == addresses[0]
    assert vllm_flags.interface_env(over_nodes(rank, addresses[0]), "A") == {"A": interface_of(addresses[0])}


def test_without_a_way_to_the_first_node_nothing_is_guessed() -> None:
    lost = over_nodes(1, "no-such-host.invalid")
    assert "VLLM_HOST_IP" not in vllm_flags.serve_env(lost)
    assert vllm_flags.interface_env(lost, "A") == {}
    assert address_towards("no-such-host.invalid") is None


def test_the_way_to_an_own_address_is_that_address() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert [address_towards(address) for address in own_addresses()] == own_addresses()
