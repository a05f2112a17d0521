"""Pre-flight of a CPU group: the ranks meet over Gloo and all-reduce a known vector, in seconds instead of minutes.

``python -m hetero_llm_cpu.preflight [DEADLINE_S]``, once per rank, with the rank's variables set. Exit 0 when the sum
is right; else one line of cause on stderr that names rank, address and interface, and exit 1.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

_DEFAULT_DEADLINE_S = 30.0
_LENGTH = 1024


def main(deadline_s: float) -> None:
    """Meet, add, compare. Raises RuntimeError with a cause in one line, or what torch raises."""
    import torch
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=deadline_s))
    if dist.get_backend() != "gloo":
        raise RuntimeError(f"the group uses {dist.get_backend()} instead of gloo")
    # Rank r contributes r + 1 + i at place i, so a rank that is missing, doubled or shifted changes the sum.
    places = torch.arange(_LENGTH, dtype=torch.int64)
    vector = places + rank + 1
    dist.all_reduce(vector)
    expected = places * world_size + world_size * (world_size + 1) // 2
    if not torch.equal(vector, expected):
        raise RuntimeError(f"all-reduce gave {vector[:2].tolist()}…, expected {expected[:2].tolist()}…")
    dist.barrier()
    dist.destroy_process_group()


def _where() -> str:
    env = os.environ
    peer = f"{env.get('MASTER_ADDR', '?')}:{env.get('MASTER_PORT', '?')}"
    interface = env.get("GLOO_SOCKET_IFNAME", "unset")
    return f"rank {env.get('RANK', '?')} of {env.get('WORLD_SIZE', '?')}, rank 0 at {peer}, interface {interface}"


def _fail(cause: str) -> None:
    sys.stderr.write(f"gloo pre-flight failed ({_where()}): {' '.join(cause.split())}\n")
    sys.stderr.flush()
    # Threads of Gloo may wait for ranks that never come; nothing here needs an orderly end.
    os._exit(1)


def run(deadline_s: float) -> None:
    """Run `main` and end the process with 1 and one line of cause on any failure, or when the deadline has passed."""
    watchdog = threading.Timer(deadline_s, _fail, (f"not done after {deadline_s:g} s",))
    watchdog.daemon = True
    watchdog.start()
    try:
        main(deadline_s)
    except KeyError as error:
        _fail(f"the variable {error.args[0]} is not set")
    # Whatever torch or the network raises is the cause to report; the exit status tells the rest.
    except Exception as error:  # noqa: BLE001
        _fail(f"{type(error).__name__}: {error}")
    watchdog.cancel()


if __name__ == "__main__":
    run(float(sys.argv[1]) if len(sys.argv) > 1 else _DEFAULT_DEADLINE_S)
