"""The contract of an installed plugin, run by ``hetero-llm plugins check``; a variable names the backend."""

from __future__ import annotations

import os

from hetero_llm.testing import BackendContract
from hetero_llm.testing.check import BACKEND_ENV


class TestInstalled(BackendContract):
    """The contract without any fake: level 0, and level 2 where the hardware is."""

    backend = os.environ.get(BACKEND_ENV, "")
