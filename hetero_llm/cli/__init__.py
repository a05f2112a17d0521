"""The command line: one file per verb; only render.py prints."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line of this process and exit with its code (see `hetero_llm.errors.ExitCode`)."""
    from hetero_llm.cli.entry import run

    sys.exit(run(sys.argv[1:]))
