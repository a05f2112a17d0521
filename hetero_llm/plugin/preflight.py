"""Pre-flight of one rank: meet the others over the kind's real collective backend and all-reduce a known vector.

``python -m hetero_llm.plugin.preflight --backend NAME --device TYPE [--deadline-s N] [--import MODULE]…``, once per
rank, all ranks at once, with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT`` and the kind's
own variables set. ``LOCAL_RANK`` is the place of the rank's device among those its process sees. Seconds instead of the
minutes an engine takes to say the same.

Each line it prints is one `RankLine` as JSON: on stderr when a phase begins and when it fails (exit status 1), on
stdout when all is well (exit status 0). The phases are `PHASES`.

The backend asked for is the one used or none: torch and vLLM would go on with gloo when another is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hetero_llm.plugin.interfaces import address_towards, interface_of
from hetero_llm.plugin.rank_line import RankReporter

DEFAULT_DEADLINE_S = 30.0

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_VECTOR_LENGTH = 1024
_MEASURED_BYTES = 4 << 20
_MEASURED_TIMES = 5
_RETRY_S = 0.2
_TRY_S = 5.0


class _Refused(Exception):
    """The rank cannot take part; the text is the whole cause."""


def check(rank: RankReporter, device_type: str, modules: Sequence[str]) -> None:
    """Go through all phases; raises what torch raises, or a refusal with a cause in one line."""
    rank.enter("variables")
    env = _variables(rank)
    rank.enter("backend")
    _load_backend(rank, modules)
    rank.enter("device")
    device = _select_device(rank, device_type, int(env["LOCAL_RANK"]))
    rank.enter("meeting")
    store = _meet(rank, env)
    rank.enter("all-reduce")
    _all_reduce(device, int(env["RANK"]), int(env["WORLD_SIZE"]))
    rank.enter("bandwidth")
    rank.learn(bandwidth_bytes_per_s=_bandwidth(device))
    rank.enter("leaving")
    _leave(rank, store, int(env["RANK"]), int(env["WORLD_SIZE"]))


def _variables(rank: RankReporter) -> dict[str, str]:
    for name in _VARIABLES:
        if not os.environ.get(name):
            raise _Refused(f"the variable {name} is not set")
    env = {name: os.environ[name] for name in _VARIABLES}
    for name in _VARIABLES:
        if name != "MASTER_ADDR" and not re.fullmatch(r"[0-9]+", env[name]):
            raise _Refused(f"the variable {name} must be a whole number, not {env[name]!r}")
    rank.learn(rank=int(env["RANK"]), interfaces=_interfaces(rank.line.backend, env["MASTER_ADDR"]))
    return env


def _interfaces(backend: str, master: str) -> tuple[str, ...]:
    stated = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "")
    if stated:
        return tuple(stated.split(","))
    own = address_towards(master)
    name = interface_of(own) if own else None
    return (name,) if name else ()


def _load_backend(rank: RankReporter, modules: Sequence[str]) -> None:
    backend = rank.line.backend
    import torch
    import torch.distributed as dist

    versions = {"torch": str(torch.__version__)}
    rank.learn(versions=versions)
    for name in modules:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise _Refused(f"{name}, which brings the backend {backend}, cannot be imported: {error}") from error
        versions = {**versions, name: str(getattr(module, "__version__", "unknown"))}
        rank.learn(versions=versions)
    if not (dist.is_available() and dist.is_backend_available(backend)):
        text = f"torch {torch.__version__} has no backend {backend} (it has {', '.join(_available())})"
        raise _Refused(f"{text}; another one is never used in its place")
    if backend == "nccl":
        rank.learn(versions={**versions, "nccl": ".".join(str(part) for part in torch.cuda.nccl.version())})


def _available() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return ["none"]
    unreal = ("undefined", "fake")
    return [name for name in dist.Backend.backend_list if name not in unreal and dist.is_backend_available(name)]


def _select_device(rank: RankReporter, device_type: str, local_rank: int) -> Any:
    """Return the torch device of this rank, made current and used once."""
    import torch

    rank.learn(device=device_type)
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    count = module.device_count()
    if count == 0 or not module.is_available():
        raise _Refused(f"torch sees no usable {device_type} device{_visible()}")
    if local_rank >= count:
        raise _Refused(f"LOCAL_RANK is {local_rank}, but torch sees {count} {device_type} device(s){_visible()}")
    device = torch.device(device_type, local_rank)
    rank.learn(device=str(device))
    module.set_device(device)
    torch.ones(1, device=device).item()
    uuid = getattr(module.get_device_properties(device), "uuid", None)
    rank.learn(device_id=str(uuid) if uuid else None)
    return device


def _visible() -> str:
    shown = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.endswith("VISIBLE_DEVICES")]
    return f" ({', '.join(shown)})" if shown else ""


def _meet(rank: RankReporter, env: Mapping[str, str]) -> Any:
    """Wait until every rank is there, then form the process group; return the store they share."""
    import torch.distributed as dist

    number, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    master, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    if number != 0:
        _reach(rank, master, port)
    store = dist.TCPStore(
        # Rank 0 listens on all addresses; whether the others reach it by this one is theirs to find out.
        master if number else "127.0.0.1",
        port,
        size,
        is_master=number == 0,
        timeout=rank.timeout(),
        wait_for_workers=False,
    )
    _announce(rank, store, "here", number)
    _await_all(rank, store, "here", range(size), "never came")
    dist.init_process_group(
        rank.line.backend,
        store=dist.PrefixStore("group", store),
        rank=number,
        world_size=size,
        timeout=rank.timeout(),
    )
    if dist.get_backend() != rank.line.backend:
        raise _Refused(f"the group uses {dist.get_backend()} instead of {rank.line.backend}")
    return store


def _reach(rank: RankReporter, master: str, port: int) -> None:
    """Wait until rank 0 listens. The store would too, but overruns its time-out and does not say why it failed."""
    try:
        socket.getaddrinfo(master, port)
    except socket.gaierror as error:
        raise _Refused(f"the name {master} of rank 0's address is not known: {error.strerror}") from error
    began, why = time.monotonic(), "no time left"
    while (left_s := rank.left_s()) > _RETRY_S:
        try:
            socket.create_connection((master, port), timeout=min(left_s, _TRY_S)).close()
            return
        except OSError as error:
            # Refused is what a rank 0 that has not come so far looks like, too.
            why = error.strerror or str(error)
        time.sleep(_RETRY_S)
    raise _Refused(f"no connection to rank 0 at {master}:{port} within {time.monotonic() - began:.0f} s: {why}")


def _announce(rank: RankReporter, store: Any, word: str, number: int) -> None:
    store.set(f"{word}/{number}", rank.line.node)


def _await_all(rank: RankReporter, store: Any, word: str, ranks: Sequence[int], missing_text: str) -> None:
    """Wait until each of `ranks` has announced `word`."""
    import torch.distributed as dist

    began = time.monotonic()
    try:
        store.wait([f"{word}/{number}" for number in ranks], rank.timeout())
    except dist.DistStoreError as error:
        missing = [str(number) for number in ranks if not store.check([f"{word}/{number}"])]
        waited = f"waited {time.monotonic() - began:.0f} s"
        raise _Refused(f"{waited}: rank {', '.join(missing) or '?'} {missing_text}") from error


def _all_reduce(device: Any, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    # Rank r contributes r + 1 + i at place i, so a rank that is missing, doubled or shifted changes the sum. 32 bits:
    # every collective library adds them, and exactly.
    places = torch.arange(_VECTOR_LENGTH, dtype=torch.int32)
    vector = (places + rank + 1).to(device)
    dist.all_reduce(vector)
    got = vector.cpu()
    expected = places * size + size * (size + 1) // 2
    if not torch.equal(got, expected):
        wrong = int((got != expected).nonzero()[0].item())
        raise _Refused(f"the all-reduce is wrong: {got[wrong].item()} at place {wrong}, not {expected[wrong].item()}")


def _bandwidth(device: Any) -> float:
    import torch
    import torch.distributed as dist

    vector = torch.zeros(_MEASURED_BYTES // 4, dtype=torch.float32, device=device)
    times_s: list[float] = []
    for _ in range(_MEASURED_TIMES + 1):
        began = time.perf_counter()
        dist.all_reduce(vector)
        # Reading a value waits for the device.
        vector[0].item()
        times_s.append(time.perf_counter() - began)
    return _MEASURED_BYTES / statistics.median(times_s[1:])


def _leave(rank: RankReporter, store: Any, number: int, size: int) -> None:
    """Leave when all have what they need; rank 0 last, since the store the others read is in its process."""
    import torch.distributed as dist

    _announce(rank, store, "finished", number)
    _await_all(rank, store, "finished", range(size), "did not finish its all-reduce")
    dist.destroy_process_group()
    _announce(rank, store, "left", number)
    if number == 0:
        _await_all(rank, store, "left", range(size), "did not leave")


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hetero_llm.plugin.preflight", description=__doc__.split("\n")[0])
    parser.add_argument("--backend", required=True, help="torch.distributed backend: gloo, nccl, hccl, a vendor's own")
    parser.add_argument("--device", required=True, help="torch device type: cpu, cuda, npu, a vendor's own")
    parser.add_argument("--deadline-s", type=float, default=DEFAULT_DEADLINE_S, help="seconds this process may take")
    parser.add_argument("--import", action="append", default=[], dest="modules", help="module that brings the backend")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> NoReturn:
    """Run one rank; never returns. Exit status 0 or, with one line of cause on stderr, 1."""
    arguments = _arguments(argv)
    rank = RankReporter(arguments.backend, arguments.deadline_s)
    rank.watch()
    try:
        check(rank, arguments.device, arguments.modules)
    except _Refused as refusal:
        rank.fail(str(refusal))
    # Whatever torch, a vendor's library or the network raises is the cause to report.
    except Exception as error:  # noqa: BLE001
        rank.fail(f"{type(error).__name__}: {error}")
    rank.succeed()


if __name__ == "__main__":
    main(sys.argv[1:])
