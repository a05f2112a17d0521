"""Blocks are counted by reference; free ones stay findable until the space is needed, oldest out first."""

from hetero_llm_sim.kv_cache import KvCache
from hypothesis import given
from hypothesis import strategies as st


def filled(cache, tokens):
    """Take blocks for `tokens`, remember them, and return (blocks, hashes)."""
    hashes = []
    cache.extend_hashes(hashes, tokens, len(tokens))
    blocks = cache.take(len(tokens) // cache.block_tokens)
    for block, value in zip(blocks, hashes, strict=True):
        cache.remember(block, value)
    return blocks, hashes


def test_a_prefix_is_found_after_its_request_has_gone():
    cache = KvCache(8, 4)
    blocks, hashes = filled(cache, list(range(16)))
    cache.give_back(blocks)
    assert cache.take_prefix(hashes) == blocks


def test_a_block_matches_only_after_the_same_tokens():
    cache = KvCache(8, 4)
    filled(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    hashes = []
    cache.extend_hashes(hashes, [9, 9, 9, 9, 5, 6, 7, 8], 8)
    assert cache.take_prefix(hashes) == []


def test_the_longest_known_beginning_is_found():
    cache = KvCache(8, 4)
    blocks, _ = filled(cache, list(range(12)))
    hashes = []
    cache.extend_hashes(hashes, [*range(8), 99, 99, 99, 99], 12)
    assert cache.take_prefix(hashes) == blocks[:2]


def test_the_oldest_prefix_is_forgotten_first_and_its_last_block_before_its_first():
    cache = KvCache(4, 4)
    old, old_hashes = filled(cache, [1] * 8)
    new, new_hashes = filled(cache, [2] * 8)
    cache.give_back(old)
    cache.give_back(new)
    cache.take(1)
    assert cache.take_prefix(new_hashes) == new
    assert cache.take_prefix(old_hashes) == old[:1]


def test_a_shared_block_is_free_only_when_the_last_holder_has_gone():
    cache = KvCache(2, 4)
    blocks, hashes = filled(cache, list(range(8)))
    shared = cache.take_prefix(hashes)
    cache.give_back(blocks)
    assert cache.free_blocks == 0
    cache.give_back(shared)
    assert cache.free_blocks == 2


def test_more_blocks_than_are_free_are_refused_whole():
    cache = KvCache(3, 4)
    assert cache.take(4) is None
    assert cache.free_blocks == 3


def test_without_prefix_caching_nothing_is_found():
    cache = KvCache(8, 4, prefix_caching=False)
    blocks, hashes = filled(cache, list(range(8)))
    cache.give_back(blocks)
    assert cache.take_prefix(hashes) == []


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=60))
def test_no_block_is_ever_lost_or_held_twice(actions):
    cache, held = KvCache(12, 2), []
    for action, size in actions:
        if action == 0 and held:
            cache.give_back(held.pop(size % len(held)))
            continue
        tokens = [size] * (2 * size) if action == 1 else [action, *range(2 * size - 1)]
        hashes = []
        cache.extend_hashes(hashes, tokens, len(tokens))
        found = cache.take_prefix(hashes)
        more = cache.take(size - len(found))
        if more is None:
            cache.give_back(found)
            continue
        for block, value in zip(more, hashes[len(found) :], strict=True):
            cache.remember(block, value)
        held.append(found + more)
    assert cache.free_blocks == 12 - len({block for blocks in held for block in blocks})
    for blocks in held:
        assert len(blocks) == len(set(blocks))
        cache.give_back(blocks)
    assert cache.free_blocks == 12
