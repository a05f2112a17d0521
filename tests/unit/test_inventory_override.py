from __future__ import annotations

import pytest

from hetero_llm.errors import OverrideInvalid
from hetero_llm.inventory.override import overridden_kinds, override, pretended_only

GIB = 1 << 30


def test_an_override_makes_simulated_healthy_devices() -> None:
    found = override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=2,type=H100-80GB,memory=80GiB"})
    assert found is not None
    assert [(d.accelerator, d.index, d.memory_bytes, d.free_bytes) for d in found.devices] == [
        ("H100-80GB", 0, 80 * GIB, 80 * GIB),
        ("H100-80GB", 1, 80 * GIB, 80 * GIB),
    ]
    assert all(device.simulated and device.health == "ok" for device in found.devices)
    assert len({device.uid for device in found.devices}) == 2


def test_a_kind_without_a_plugin_can_be_overridden() -> None:
    found = override("toynpu", {"HETERO_LLM_OVERRIDE_TOYNPU": "count=1,type=T1,memory=1GB"})
    assert found is not None
    assert found.devices[0].kind == "toynpu"


def test_memory_is_taken_from_the_matrix_when_left_out() -> None:
    found = override("ascend", {"HETERO_LLM_OVERRIDE_ASCEND": "count=1,type=910B2"})
    assert found is not None
    assert found.devices[0].memory_bytes == 64 * GIB


def test_memory_of_an_unlisted_type_stays_unknown() -> None:
    found = override("toy", {"HETERO_LLM_OVERRIDE_TOY": "count=1,type=T1"})
    assert found is not None
    assert found.devices[0].memory_bytes is None


def test_free_memory_can_differ() -> None:
    found = override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=1, type=X, memory=1.5GiB, free=512MiB"})
    assert found is not None
    assert (found.devices[0].memory_bytes, found.devices[0].free_bytes) == (1536 << 20, 512 << 20)


def test_an_engine_that_stands_in_can_be_named() -> None:
    found = override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=1,type=H100-80GB,memory=80GiB,engine=sim"})
    assert found is not None
    (device,) = found.devices
    assert (device.simulated, device.stand_in, pretended_only(device)) == (True, "sim", False)


def test_a_pretended_device_without_an_engine_is_only_for_plans() -> None:
    found = override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=1,type=H100-80GB,memory=80GiB"})
    assert found is not None
    assert (found.devices[0].stand_in, pretended_only(found.devices[0])) == (None, True)


def test_an_engine_must_be_a_kind() -> None:
    with pytest.raises(OverrideInvalid, match="OVERRIDE_CUDA"):
        override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=1,type=X,engine=/bin/sh"})


def test_count_zero_says_there_is_none() -> None:
    found = override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": "count=0"})
    assert found is not None
    assert found.devices == ()


def test_without_a_variable_there_is_no_override() -> None:
    assert override("cuda", {}) is None
    assert override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": " "}) is None


def test_overridden_kinds_come_from_the_variables_that_are_set() -> None:
    environ = {"HETERO_LLM_OVERRIDE_CUDA": "count=0", "HETERO_LLM_OVERRIDE_CPU": "", "OTHER": "x"}
    assert overridden_kinds(environ) == ("cuda",)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("type=X", "'count' must be a whole number"),
        ("count=-1,type=X", "'count' must be a whole number"),
        ("count=two,type=X", "not 'two'"),
        ("count=99999999,type=X", "from 0 to 4096"),
        ("count=1", "'type' must be"),
        ("count=1,type=a b", "not 'a b'"),
        ("count=1,type=X,memory=much", "must be a size such as 80GiB, not 'much'"),
        ("count=1,type=X,memory=3XB", "not '3XB'"),
        ("count=1,type=X,memmory=3GB", "did you mean 'memory'?"),
        ("count=1,count=2,type=X", "'count' is given twice"),
        ("count", "is not one of"),
        ("count=1,,type=X", "is not one of"),
    ],
)
def test_an_unreadable_override_names_the_variable_and_the_fault(text: str, complaint: str) -> None:
    with pytest.raises(OverrideInvalid) as caught:
        override("cuda", {"HETERO_LLM_OVERRIDE_CUDA": text})
    assert "HETERO_LLM_OVERRIDE_CUDA" in caught.value.report.message
    assert complaint in (caught.value.report.cause or "")
    assert caught.value.report.next
