"""One rank of the stub kind's pre-flight: passes, unless the file ``STUB_PREFLIGHT`` names has this rank's number.

The other ranks then wait for it, as ranks of a real collective do. Each run leaves a line in ``<that file>.ran``.
"""

import os
import sys
import time
from pathlib import Path

fails = Path(os.environ["STUB_PREFLIGHT"])
with fails.with_suffix(".ran").open("a") as ran:
    ran.write(f"{os.environ['RANK']}\n")
if fails.exists():
    if fails.read_text() == os.environ["RANK"]:
        sys.exit("ValueError: the link of this rank is down")
    time.sleep(600)
