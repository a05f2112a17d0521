import dataclasses

from hetero_llm.models.aliases import ALIASES
from hetero_llm.scheduler.shapes import kv_note, tp_refusal, tp_sizes

SMOLLM2 = ALIASES["smollm2-135m"].facts
QWEN_7B = dataclasses.replace(
    SMOLLM2, heads=28, kv_heads=4, head_dim=128, hidden_size=3584, intermediate_size=18_944, vocab_size=152_064
)


def test_the_demo_model_can_be_split_into_1_or_3():
    assert tp_sizes(SMOLLM2, 64) == (1, 3)


def test_28_heads_on_8_devices_can_be_split_into_1_2_or_4():
    assert tp_sizes(QWEN_7B, 8) == (1, 2, 4)


def test_a_refusal_names_the_heads_and_every_size_that_divides():
    refusal = tp_refusal(SMOLLM2, 2)
    assert refusal is not None
    assert "9 query heads" in refusal
    assert "3 KV heads" in refusal
    assert refusal.endswith("TP can be 1, 3")


def test_more_ranks_than_kv_heads_are_allowed_when_heads_replicate_evenly():
    assert tp_refusal(dataclasses.replace(QWEN_7B, heads=32), 8) is None


def test_ranks_that_neither_split_nor_replicate_kv_heads_are_refused():
    assert "4 KV heads" in (tp_refusal(dataclasses.replace(QWEN_7B, heads=24, intermediate_size=None), 6) or "")


def test_a_feed_forward_width_that_does_not_divide_is_refused():
    facts = dataclasses.replace(QWEN_7B, kv_heads=28)
    assert "feed-forward width of 18944" in (tp_refusal(facts, 7) or "")


def test_a_vocabulary_that_does_not_divide_after_padding_is_refused():
    facts = dataclasses.replace(SMOLLM2, vocab_size=49_152 + 64)
    assert "vocabulary of 49216" in (tp_refusal(facts, 3) or "")


def test_tp_leaves_quantisation_groups_whole():
    facts = dataclasses.replace(QWEN_7B, heads=64, kv_heads=8, intermediate_size=29_568, quantization_group_size=128)
    assert "29568 in quantisation groups of 128" in (tp_refusal(facts, 8) or "")
    assert tp_refusal(dataclasses.replace(facts, intermediate_size=29_696), 8) is None


def test_replicated_kv_heads_are_noted():
    assert kv_note(dataclasses.replace(QWEN_7B, heads=32), 8) == "4 KV heads replicated 2 times"
    assert kv_note(QWEN_7B, 4) is None
