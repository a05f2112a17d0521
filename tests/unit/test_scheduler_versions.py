"""Versions that cannot work together are refused in the plan; what the matrix does not list is not."""

import pytest
from plan_cases import QWEN_7B, node

from hetero_llm.matrix import VersionSet, parse_matrix
from hetero_llm.model import PoolWish
from hetero_llm.scheduler.planner import make_plan
from hetero_llm.scheduler.versions import version_conflict

MATRIX = parse_matrix("""
schema: 1
accelerators:
  - kind: ascend
    accelerator: 910B2
    vendor: Huawei
    collective: hccl
    dtypes: [bfloat16]
    features: [tp, pp]
    evidence: &evidence [{source: this test, date: 2026-12-01, level: reported}]
    versions:
      - {toolkit: "9.0", torch: "2.10", vllm: 0.23.0, plugin: 0.23.0, evidence: *evidence}
      - {toolkit: "8.5", torch: "2.9", vllm: 0.18.0, plugin: 0.18.0, evidence: *evidence}
""")
BOUND: tuple[VersionSet, ...] = MATRIX.entries[0].versions
FREE = tuple(VersionSet(vllm="0.32.0", plugin="0.1.0", torch="2.13.0+cpu", evidence=known.evidence) for known in BOUND)


def test_a_listed_set_is_accepted():
    assert (
        version_conflict(BOUND, {"toolkit": "9.0.1", "torch": "2.10.0", "vllm": "0.23.0", "plugin": "0.23.0"}) is None
    )


def test_a_plugin_for_another_vllm_is_refused_with_both_versions():
    conflict = version_conflict(BOUND, {"vllm": "0.23.0", "plugin": "0.18.0"})
    assert conflict == "the plugin 0.18.0 needs vLLM 0.18.x, the node has vLLM 0.23.0"


def test_a_newer_pair_that_nobody_listed_is_accepted():
    assert version_conflict(BOUND, {"toolkit": "10.0", "vllm": "0.31.0", "plugin": "0.31.1"}) is None


def test_a_toolkit_of_another_major_version_is_refused_with_both_versions():
    conflict = version_conflict(BOUND, {"toolkit": "8.5.1", "vllm": "0.23.0", "plugin": "0.23.0"})
    assert conflict == "vLLM 0.23.0 needs toolkit 9.0, the node has 8.5.1"


@pytest.mark.parametrize("found", [{"toolkit": "9.1.0", "torch": "2.11.0", "vllm": "0.23.1", "plugin": "0.23.0"}])
def test_a_small_difference_is_no_proof_of_failure(found):
    assert version_conflict(BOUND, found) is None


@pytest.mark.parametrize("found", [{}, {"vllm": None, "plugin": "0.18.0"}, {"vllm": "0.23.0"}])
def test_what_is_not_known_is_not_refused(found):
    assert version_conflict(BOUND, found) is None


def test_a_plugin_with_numbers_of_its_own_is_not_compared_with_vllm():
    assert version_conflict(FREE, {"vllm": "0.32.0", "plugin": "0.2.0", "torch": "2.13.0"}) is None


def test_the_plan_refuses_a_node_whose_versions_do_not_go_together():
    bad = node("bad", "ascend", "910B2", 2, 64, vllm="0.23.0", plugin="0.18.0")
    good = node("good", "ascend", "910B2", 2, 64, vllm="0.23.0", plugin="0.23.0")
    made = make_plan(QWEN_7B, PoolWish(), [bad, good], {}, MATRIX)
    assert made.replicas[0].placement[0].node == "good"
    assert [(item.node, item.rule) for item in made.rejections] == [("bad", "version")]
