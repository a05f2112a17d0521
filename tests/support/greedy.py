"""Greedy tokens of a served model, to compare what ought to compute the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sandbox import Serve

PROMPTS = ("A pool of unequal", "The router sends each", "Count from one", "7 8 9")
TOKENS = 32

# The cache is no whole number of blocks.
SIZES = ("--max-model-len", "512", "--kv-cache-bytes", str((1 << 27) + 12_345))

Greedy = list[tuple[list[int], list[float]]]


def greedy(serve: Serve) -> Greedy:
    """Return per prompt the token ids and their log-probabilities."""
    results = []
    with serve.client() as client:
        for prompt in PROMPTS:
            body = {"model": serve.ready["models"][0], "prompt": prompt, "temperature": 0, "max_tokens": TOKENS}
            answer = client.post("/v1/completions", json={**body, "logprobs": 1, "return_token_ids": True})
            assert answer.status_code == 200, answer.text
            choice = answer.json()["choices"][0]
            results.append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return results


def assert_same(one: Greedy, other: Greedy) -> None:
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(one, other, strict=True):
        assert len(tokens) == TOKENS
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=0.05)
