from __future__ import annotations

import ipaddress
import json
import os
import socket
from pathlib import Path

import pytest

from hetero_llm.errors import InventoryInvalid, OverrideInvalid
from hetero_llm.inventory.node import discover_kinds, load_inventory, local_address, local_inventories
from hetero_llm.model import SCHEMA_VERSION, Inventory, to_data
from hetero_llm.plugin.manager import load_plugins


def write(path: Path, document: object) -> Path:
    path.write_text(json.dumps(document))
    return path


def node(name: str, *uids: str) -> dict[str, object]:
    devices = [{"kind": "toy", "accelerator": "T1", "uid": uid, "index": i} for i, uid in enumerate(uids)]
    return {"node": name, "host": name, "address": "10.0.0.1", "kind": "toy", "devices": devices}


def test_a_machine_of_one_kind_is_one_node_named_after_the_host() -> None:
    (found,) = local_inventories(load_plugins())
    assert (found.node, found.host, found.kind) == (socket.gethostname(), socket.gethostname(), "cpu")
    assert found.devices
    assert found.versions["vllm"] == "0.32.0"


def test_a_machine_of_two_kinds_is_two_nodes_of_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "count=2,type=T1,memory=1GiB")
    found = local_inventories(load_plugins())
    host = socket.gethostname()
    assert [(n.node, n.host, n.kind) for n in found] == [
        (f"{host}-cpu", host, "cpu"),
        (f"{host}-toynpu", host, "toynpu"),
    ]


def test_only_the_kinds_asked_for_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "count=2,type=T1,memory=1GiB")
    (found,) = local_inventories(load_plugins(), kinds=("toynpu",))
    assert (found.node, found.kind) == (socket.gethostname(), "toynpu")


def test_a_node_can_be_named_and_its_pretended_devices_carry_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "count=1,type=T1,memory=1GiB")
    monkeypatch.setenv("HETERO_LLM_NODE_NAME", "rack-7")
    (found,) = local_inventories(load_plugins(), kinds=("toynpu",))
    assert (found.node, found.host) == ("rack-7", socket.gethostname())
    assert [device.uid for device in found.devices] == ["simulated-rack-7-toynpu-0"]


def test_what_another_environment_pretends_is_found_in_it_only() -> None:
    there = discover_kinds(("toynpu",), {"HETERO_LLM_OVERRIDE_TOYNPU": "count=1,type=T1,memory=1GiB"})
    assert [device.accelerator for device in there["toynpu"].discovery.devices] == ["T1"]
    assert "HETERO_LLM_OVERRIDE_TOYNPU" not in os.environ


def test_an_override_replaces_the_real_devices_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_CPU", "count=3,type=epyc-avx512,memory=64GiB")
    (found,) = local_inventories(load_plugins())
    assert [device.accelerator for device in found.devices] == ["epyc-avx512"] * 3
    assert all(device.simulated for device in found.devices)


def test_a_kind_without_devices_or_problems_is_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "count=0")
    assert [n.kind for n in local_inventories(load_plugins())] == ["cpu"]


def test_an_unreadable_override_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_LLM_OVERRIDE_TOYNPU", "nonsense")
    with pytest.raises(OverrideInvalid):
        local_inventories(load_plugins())


def test_the_local_address_is_an_ip_address() -> None:
    assert ipaddress.ip_address(local_address())


def test_what_devices_prints_can_be_loaded_again(tmp_path: Path) -> None:
    here = Inventory(nodes=local_inventories(load_plugins()))
    file = write(tmp_path / "inventory.json", {"schema": SCHEMA_VERSION, "data": to_data(here)})
    assert load_inventory(file) == here


def test_keys_of_a_newer_version_are_ignored(tmp_path: Path) -> None:
    document = {"schema": 1, "data": {"nodes": [node("a", "u1") | {"rack": 7}], "site": "x"}}
    assert load_inventory(write(tmp_path / "i.json", document)).nodes[0].devices[0].uid == "u1"


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], 'no "data"'),
        ({"nodes": []}, 'no "data"'),
        ({"schema": 2, "data": {"nodes": []}}, "its schema is 2, this hetero-llm reads 1"),
        ({"schema": 1, "data": {"nodes": [{"node": "a"}]}}, "missing required field `host` - at `$.nodes[0]`"),
        ({"schema": 1, "data": {"nodes": [node("a"), node("a")]}}, "node 'a' appears twice"),
        ({"schema": 1, "data": {"nodes": [node("a", "u1"), node("b", "u1")]}}, "device uid 'u1' appears twice"),
    ],
)
def test_a_file_that_is_no_inventory_is_refused_with_the_place(
    tmp_path: Path, document: object, complaint: str
) -> None:
    with pytest.raises(InventoryInvalid) as caught:
        load_inventory(write(tmp_path / "i.json", document))
    assert "i.json" in caught.value.report.message
    assert complaint in (caught.value.report.cause or "")


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"kind: cpu\n"])
def test_a_file_that_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "i.json"
    file.write_bytes(content)
    with pytest.raises(InventoryInvalid):
        load_inventory(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InventoryInvalid) as caught:
        load_inventory(tmp_path / "none.json")
    assert caught.value.report.cause == "No such file or directory"


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InventoryInvalid):
        load_inventory(tmp_path)
