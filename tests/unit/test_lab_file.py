"""What a lab file may say, and how it is told what is wrong with it."""

from pathlib import Path

import pytest

from hetero_llm.cluster.lab_file import load_lab
from hetero_llm.errors import ConfigInvalid, ConfigUnreadable

MIXED = Path(__file__).parents[2] / "deploy" / "lab" / "mixed.yaml"


@pytest.fixture
def write(tmp_path):
    def to_file(text):
        path = tmp_path / "lab.yaml"
        path.write_text(text)
        return path

    return to_file


def complaint(path):
    with pytest.raises(ConfigInvalid) as caught:
        load_lab(path)
    return str(caught.value).removeprefix(f"{path}:")


def test_the_mixed_lab_has_four_nodes_of_three_kinds_and_real_cpu_devices():
    nodes = load_lab(MIXED)
    assert [node.kind for node in nodes] == ["cuda", "ascend", "ascend", "cpu"]
    assert [node.devices is None for node in nodes] == [False, False, False, True]
    assert len({node.name for node in nodes}) == 4


def test_pretended_devices_become_the_override_of_their_kind_and_carry_the_nodes_name(write):
    (node,) = load_lab(write('nodes: [{name: a, kind: toynpu, devices: "count=1,type=T1"}]'))
    environ = node.environ({"PATH": "/bin"})
    assert environ["HETERO_LLM_OVERRIDE_TOYNPU"] == "count=1,type=T1"
    assert environ["HETERO_LLM_NODE_NAME"] == "a"
    assert environ["PATH"] == "/bin"


def test_the_simulated_kind_gets_its_own_variables(write):
    (node,) = load_lab(write('nodes: [{name: s, kind: sim, devices: "fast=1"}]'))
    environ = node.environ({})
    assert (environ["HETERO_LLM_SIM_DEVICES"], environ["HETERO_LLM_SIM_NODE"]) == ("fast=1", "s")
    assert not [name for name in environ if name.startswith("HETERO_LLM_OVERRIDE_")]


def test_what_the_callers_machine_pretends_is_not_pretended_by_its_nodes(write):
    (node,) = load_lab(write("nodes: [{name: real, kind: cpu}]"))
    environ = node.environ({"HETERO_LLM_OVERRIDE_CPU": "count=9,type=x", "HETERO_LLM_SIM_DEVICES": "fast=1"})
    assert environ == {"HETERO_LLM_NODE_NAME": "real", "HETERO_LLM_SIM_NODE": "real"}


def test_variables_of_a_node_win_and_numbers_in_them_are_text(write):
    (node,) = load_lab(write("nodes: [{name: a, kind: cpu, env: {PATH: /opt, LEVEL: 3}}]"))
    environ = node.environ({"PATH": "/bin"})
    assert (environ["PATH"], environ["LEVEL"]) == ("/opt", "3")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes:\n- {name: a, kind: cpu, device: x}", "2:24: unknown key 'device'; did you mean 'devices'?"),
        ("node: []", "1:1: unknown key 'node'; did you mean 'nodes'?"),
        ("nodes:\n- {name: a}", "2:3: 'kind' is missing"),
        ("nodes:\n- {name: a, kind: cpu}\n- {name: a, kind: cpu}", "3:4: node 'a' stands twice"),
        ("nodes: []", "1:1: nodes: "),
        ("nodes:\n- {name: a, kind: cuda, devices: 'count=one'}", "2:25: devices: 'count' must be a whole number"),
        ("nodes:\n- {name: a, kind: cpu, env: {HETERO_LLM_OVERRIDE_CPU: nonsense}}", "2:24: env: 'nonsense' is not"),
        ("nodes:\n- {name: a, kind: cpu, env: {'A=B': x}}", "2:30: "),
        ('nodes:\n- {name: a, kind: cpu, env: {A: "x\\0"}}', "2:30: A: "),
        ('nodes:\n- {name: a, kind: cuda, devices: "x\\0"}', "2:25: devices: "),
    ],
)
def test_a_mistake_is_told_with_its_place(write, text, told):
    assert complaint(write(text)).startswith(told)


@pytest.mark.parametrize("name", ["-a", "a b", "", "x" * 64])
def test_a_name_that_ray_would_not_take_as_a_label_is_refused(write, name):
    assert complaint(write(f'nodes:\n- {{name: "{name}", kind: cpu}}')).startswith("2:4: name: ")


def test_all_mistakes_are_told_at_once(write):
    with pytest.raises(ConfigInvalid) as caught:
        load_lab(write("nodes:\n- {name: a, kind: CPU}\n- {kind: cpu}"))
    assert "3:3: 'name' is missing" in caught.value.report.cause


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigUnreadable, match="No such file"):
        load_lab(tmp_path / "none.yaml")
