"""The KV cache of one engine: blocks counted by reference, and a prefix cache over the free ones, oldest out first.

As in vLLM: a block's hash covers all tokens before it, full blocks stay findable after their request ended until the
space is needed, and of one request the last blocks go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class KvCache:
    """Blocks 0 to `total_blocks` - 1. Pure bookkeeping: no tokens are kept, only hashes."""

    def __init__(self, total_blocks: int, block_tokens: int, *, prefix_caching: bool = True) -> None:
        self.total_blocks = total_blocks
        self.block_tokens = block_tokens
        self._caching = prefix_caching
        self._never_used = total_blocks
        # Insertion order is age: the first is evicted next.
        self._free: OrderedDict[int, None] = OrderedDict()
        self._references: dict[int, int] = {}
        self._hash_of: dict[int, int] = {}
        self._block_of: dict[int, int] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return self._never_used + len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.free_blocks / self.total_blocks

    def extend_hashes(self, hashes: list[int], tokens: Sequence[int], upto: int) -> None:
        """Append to `hashes` those of the full blocks within the first `upto` tokens that it does not have yet."""
        size = self.block_tokens
        for start in range(len(hashes) * size, upto - size + 1, size):
            # Hashes of tuples of integers are the same in every process; only equality is ever used.
            hashes.append(hash((hashes[-1] if hashes else None, tuple(tokens[start : start + size]))))

    def take_prefix(self, hashes: Sequence[int]) -> list[int]:
        """Return the cached blocks of the longest known beginning of `hashes`, now held by the caller."""
        blocks: list[int] = []
        for value in hashes if self._caching else ():
            block = self._block_of.get(value)
            if block is None:
                break
            self._free.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[int] | None:
        """Return `count` blocks for new tokens, evicting the oldest cached ones; None when fewer are free."""
        if count > self.free_blocks:
            return None
        blocks = []
        for _ in range(count):
            blocks.append(self._one())
        return blocks

    def _one(self) -> int:
        if self._never_used:
            self._never_used -= 1
            block = self._never_used
        else:
            block, _ = self._free.popitem(last=False)
            forgotten = self._hash_of.pop(block, None)
            if forgotten is not None:
                del self._block_of[forgotten]
        self._references[block] = 1
        return block

    def remember(self, block: int, value: int) -> None:
        """Make a full block findable by its hash. The first block with a hash keeps it."""
        if self._caching and value not in self._block_of:
            self._block_of[value] = block
            self._hash_of[block] = value

    def give_back(self, blocks: Sequence[int]) -> None:
        """Release blocks the caller holds, in order of their tokens."""
        for block in reversed(blocks):
            left = self._references[block] - 1
            if left:
                self._references[block] = left
            else:
                del self._references[block]
                self._free[block] = None
