"""What the doctor says of addresses, interfaces and ports; a machine's interfaces are the input."""

import socket

import pytest

from hetero_llm.cli.checks_network import (
    check_address,
    check_gateway_port,
    check_interface_variables,
    check_port_range,
    local_interfaces,
    network_checks,
)
from hetero_llm.cluster.state import state_dir

INTERFACES = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.2",), "eth1": ("10.1.0.2",), "docker0": ("172.17.0.1",)}


def test_an_address_of_an_interface_is_right():
    check = check_address("10.1.0.2", INTERFACES)
    assert (check.ok, check.text) == (True, "10.1.0.2 on eth1")


def test_an_address_of_no_interface_fails_and_tells_those_there_are():
    check = check_address("10.9.9.9", INTERFACES)
    assert check.ok is False
    assert "eth0 10.0.0.2" in check.text


def test_a_machine_with_loopback_only_can_serve_but_not_join():
    check = check_address("127.0.0.1", INTERFACES)
    assert check.ok is None
    assert "not join" in check.text


def test_this_machine_has_a_loopback_interface():
    assert any("127.0.0.1" in addresses for addresses in local_interfaces().values())


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NCCL_SOCKET_IFNAME": ""},
        {"NCCL_SOCKET_IFNAME": "eth"},
        {"NCCL_SOCKET_IFNAME": "ib,eth1"},
        {"NCCL_SOCKET_IFNAME": "=eth1"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"HCCL_SOCKET_IFNAME": "=eth0"},
        {"GLOO_SOCKET_IFNAME": "eth0,eth1"},
        {"HCCL_IF_IP": "10.0.0.2"},
    ],
)
def test_variables_that_name_interfaces_of_this_machine_are_right(environ):
    assert check_interface_variables(environ, INTERFACES).ok is True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "ib"),
        ("NCCL_SOCKET_IFNAME", "=eth"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,docker"),
        ("HCCL_SOCKET_IFNAME", "enp"),
        ("GLOO_SOCKET_IFNAME", "eth"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7"),
        ("HCCL_IF_IP", "10.0.0.3"),
    ],
)
def test_a_variable_that_names_nothing_here_fails_with_its_value(name, value):
    check = check_interface_variables({name: value}, INTERFACES)
    assert check.ok is False
    assert f"{name}={value}" in check.text
    assert check.next[0].startswith(f"unset {name}")


def test_a_free_port_is_told():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert check_gateway_port(port).ok is True


def test_a_taken_port_is_a_note_unless_a_model_is_served_here():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check = check_gateway_port(port)
        assert (check.ok, check.next[0]) == (None, "hetero-llm serve --port PORT")
        assert check_gateway_port(port, ours=True).ok is True


def test_a_folder_of_records_that_cannot_be_used_does_not_end_the_checks(cli_env):
    (state_dir() / "serve" / "m.json").mkdir(parents=True)
    assert "gateway-port" in {check.name for check in network_checks()}


@pytest.mark.parametrize(
    ("content", "ok"), [("32768\t60999\n", True), ("60000 60999\n", False), ("1024 3023", True), ("nonsense", None)]
)
def test_the_range_of_ports_must_be_large_enough(tmp_path, content, ok):
    (tmp_path / "range").write_text(content)
    assert check_port_range(tmp_path / "range").ok is ok


def test_a_system_without_a_port_range_is_unknown(tmp_path):
    assert check_port_range(tmp_path / "missing").ok is None
