"""Text and tokens are each other's exact picture, and every replica continues a prompt alike."""

from itertools import pairwise

from hetero_llm_sim.tokens import WORDS, Greedy, continuation, decode, encode
from hypothesis import given
from hypothesis import strategies as st


@given(st.text())
def test_any_text_comes_back_unchanged(text):
    assert decode(encode(text)) == text


@given(st.text(alphabet="abdo e\n", max_size=40), st.integers(0, 1000))
def test_a_generated_answer_is_read_back_as_the_tokens_it_was_made_of(prompt, seed):
    tokens = continuation(encode(prompt), 20, seed)
    assert encode(decode(tokens)) == tokens


def test_all_generated_words_are_different_and_five_bytes_long():
    assert len(set(WORDS)) == len(WORDS) == 5625
    assert {len(word.encode()) for word in WORDS} == {5}


def test_a_chat_that_goes_on_shares_the_tokens_of_what_was_said_before():
    turn = encode("<|im_start|>assistant\n")
    answer = continuation(turn, 30)
    longer = encode(decode(turn + answer) + "<|im_end|>\n<|im_start|>user\nmore")
    assert longer[: len(turn) + 30] == turn + answer


def test_english_takes_about_three_bytes_a_token():
    text = "The quick brown fox jumps over the lazy dog and goes home to sleep. " * 20
    assert 2.5 < len(text) / len(encode(text)) < 4


def test_the_same_prompt_and_seed_give_the_same_tokens():
    assert continuation([1, 2, 3], 50) == continuation([1, 2, 3], 50)


def test_other_prompts_and_other_seeds_give_other_tokens():
    first = continuation([1, 2, 3], 50)
    assert continuation([1, 2, 4], 50) != first
    assert continuation([3, 2, 1], 50) != first
    assert continuation([1, 2, 3], 50, seed=1) != first


def test_a_prompt_continued_with_the_beginning_of_its_answer_goes_on_as_the_answer_did():
    answer = continuation([7, 8, 9], 40)
    assert continuation([7, 8, 9, *answer[:15]], 25) == answer[15:]


def test_tokens_do_not_repeat_in_a_short_cycle():
    answer = continuation([5], 2000)
    assert len(set(pairwise(answer))) > 1990


def test_a_wrong_generator_is_right_until_it_is_told_to_go_wrong():
    wrong = Greedy([1, 2, 3])
    wrong.wrong_from = 3
    tokens, right = [wrong.next() for _ in range(10)], continuation([1, 2, 3], 10)
    assert tokens[:3] == right[:3]
    assert all(a != b for a, b in zip(tokens[3:], right[3:], strict=True))
