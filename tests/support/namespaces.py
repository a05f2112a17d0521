"""Hosts as network namespaces, joined by a switch in the first one; the machine's own network sees nothing of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

NETWORK = "10.99.8"


@dataclass(frozen=True)
class Hosts:
    """Name of a host → its namespace and its address."""

    netns: Mapping[str, str]
    address: Mapping[str, str]

    def pull(self, host: str) -> None:
        """Pull the cable of a host other than the first."""
        _ip("-n", self.netns[host], "link", "set", "cable", "down")

    def plug(self, host: str) -> None:
        """Put it back."""
        _ip("-n", self.netns[host], "link", "set", "cable", "up")


@contextlib.contextmanager
def hosts(names: Sequence[str]) -> Iterator[Hosts]:
    """Make the hosts; the test is skipped where that cannot be done."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the ip command")
    netns = {name: f"ht-{os.getpid()}-{name}" for name in names}
    address = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, 1)}
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                _ip("netns", "add", netns[name])
                stack.callback(_ip, "netns", "del", netns[name])
                _ip("-n", netns[name], "link", "set", "lo", "up")
            _join(names, netns, address)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield Hosts(netns, address)


def _join(names: Sequence[str], netns: Mapping[str, str], address: Mapping[str, str]) -> None:
    first = netns[names[0]]
    _ip("-n", first, "link", "add", "switch", "type", "bridge")
    _ip("-n", first, "addr", "add", f"{address[names[0]]}/24", "dev", "switch")
    _ip("-n", first, "link", "set", "switch", "up")
    for number, name in enumerate(names[1:]):
        port = f"port{number}"
        _ip("-n", first, "link", "add", port, "type", "veth", "peer", "name", "cable", "netns", netns[name])
        _ip("-n", first, "link", "set", port, "master", "switch", "up")
        _ip("-n", netns[name], "addr", "add", f"{address[name]}/24", "dev", "cable")
        _ip("-n", netns[name], "link", "set", "cable", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)
