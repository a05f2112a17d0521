"""Level 0: which models a kind refuses, and the memory it needs beside them."""

from __future__ import annotations

import pytest

from hetero_llm.plugin import ModelFacts, PoolWish
from hetero_llm.testing import samples, shapes
from hetero_llm.testing.base import Contract

_WISHES = (PoolWish(), PoolWish(tp=2), PoolWish(tp=None, pp=None), PoolWish(pp=2, max_model_len=1024))


class ModelContract(Contract):
    """A refusal names a rule the planner knows and gives a reason; nothing is ever raised."""

    @pytest.mark.parametrize("facts", samples.MODELS, ids=lambda facts: facts.name)
    def test_refusals_of_a_model_have_a_known_rule_and_a_reason(self, facts: ModelFacts) -> None:
        backend = self.plugin()
        for accelerator in self._accelerators():
            for wish in _WISHES:
                refusals = backend.check_model(facts, accelerator, wish)
                assert isinstance(refusals, tuple), f"check_model() gave {type(refusals).__name__}, not a tuple"
                for refusal in refusals:
                    shapes.check_rejection(backend.kind, accelerator, refusal)

    def test_the_same_model_is_judged_the_same_twice(self) -> None:
        for accelerator in self._accelerators():
            first = self.plugin().check_model(samples.DENSE, accelerator, PoolWish())
            assert self.plugin().check_model(samples.DENSE, accelerator, PoolWish()) == first

    @pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 2)])
    def test_memory_beside_weights_and_cache_is_whole_bytes(self, tp: int, pp: int) -> None:
        overhead_bytes = self.plugin().overhead_bytes(samples.DENSE, tp, pp)
        assert type(overhead_bytes) is int, f"overhead_bytes() gave {overhead_bytes!r}"
        assert overhead_bytes >= 0, f"overhead_bytes() gave {overhead_bytes}"

    def _accelerators(self) -> tuple[str, ...]:
        return (*dict.fromkeys(device.accelerator for device in self.sample_devices(1)), "never-heard-of")
