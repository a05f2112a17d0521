"""The contract kit: what every backend promises, as tests that a vendor runs against his own.

A plugin's test file is three lines::

    from hetero_llm.testing import BackendContract

    class TestAcme(BackendContract):
        backend = "hetero_llm_acme.plugin:AcmeBackend"

Level 0 needs no hardware and no fakes, level 1 a fake of the vendor's driver (`BackendContract.fake_devices`), level 2
the real thing. Levels 0 and 1 run by default; ``HETERO_LLM_CONTRACT_LEVEL=2``, or ``--hetero-level 2`` together with
``-p hetero_llm.testing.options``, chooses another. This is the only package of hetero-llm that needs pytest.
"""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("hetero_llm.testing needs pytest: pip install pytest", name="pytest") from error

# Before they are imported: their asserts then show both sides.
pytest.register_assert_rewrite(
    "hetero_llm.testing.shapes",
    "hetero_llm.testing.level0_plugin",
    "hetero_llm.testing.level0_discovery",
    "hetero_llm.testing.level0_group",
    "hetero_llm.testing.level0_engine",
    "hetero_llm.testing.level0_model",
    "hetero_llm.testing.level1_fakes",
    "hetero_llm.testing.level2_real",
)

from hetero_llm.testing.contract import BackendContract  # noqa: E402
from hetero_llm.testing.fakes import fake_distribution  # noqa: E402

__all__ = ["BackendContract", "fake_distribution"]
