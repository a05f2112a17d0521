"""Where the gateway may listen."""

import socket

import pytest

from hetero_llm.cli.listen import check_address, is_loopback
from hetero_llm.errors import PortInUse, UnsafeBind, UsageError


def check(host, port=0, *, has_keys=False, no_auth=False):
    check_address(host, port, has_keys=has_keys, no_auth=no_auth)


@pytest.fixture
def taken_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        yield other.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost"])
def test_loopback_needs_no_key(host):
    check(host)


def test_an_open_address_without_keys_is_refused():
    with pytest.raises(UnsafeBind) as caught:
        check("0.0.0.0")
    assert caught.value.exit_code == 2
    assert any("--api-keys" in step for step in caught.value.report.next)


@pytest.mark.parametrize("allowed", [{"has_keys": True}, {"no_auth": True}])
def test_an_open_address_is_fine_with_keys_or_when_asked_for(allowed):
    check("0.0.0.0", **allowed)


def test_a_port_in_use_is_refused_naming_its_holder(taken_port):
    with pytest.raises(PortInUse) as caught:
        check("127.0.0.1", taken_port)
    assert str(taken_port) in str(caught.value)
    assert caught.value.exit_code == 1


def test_a_free_port_is_accepted_and_left_free(taken_port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
    check("127.0.0.1", port)
    check("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine_is_a_usage_error(host, taken_port):
    with pytest.raises(UsageError):
        check(host, taken_port, has_keys=True)


@pytest.mark.parametrize(
    ("address", "loopback"), [("127.1.2.3", True), ("::1", True), ("::", False), ("10.0.0.1", False)]
)
def test_loopback_is_known_by_address(address, loopback):
    assert is_loopback(address) is loopback
