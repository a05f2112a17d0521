"""``python -m hetero_llm.gateway``: the gateway as a child process, told everything over standard input."""

from __future__ import annotations

import asyncio
import sys

import uvloop

from hetero_llm.gateway.server import run
from hetero_llm.telemetry.logging import log_to_stderr


def main() -> int:
    """Run until the pipe is closed or a signal comes."""
    log_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


if __name__ == "__main__":
    sys.exit(main())
