"""The engine's command line: vLLM's names where vLLM has the thing, so that flags meant for one suit the other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hetero_llm_sim.engine import VISIBLE_ENV
from hetero_llm_sim.faults import FAULTS_ENV, Faults, parse_faults
from hetero_llm_sim.profile import Profile, load_profiles
from hetero_llm_sim.requests import Limits
from hetero_llm_sim.service import Settings

SPEED_ENV = "HETERO_LLM_SIM_SPEED"
SEED_ENV = "HETERO_LLM_SIM_SEED"
_LONGEST_DEFAULT = 32_768


class ContextTooLong(ValueError):
    """The KV cache cannot hold one request of the context length; both numbers are in the message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, understood.

    Attributes:
        ignored: words of it that have no effect in a simulated engine.
    """

    host: str
    port: int
    headless: bool
    settings: Settings
    faults: Faults
    ignored: tuple[str, ...]


def read_options(argv: Sequence[str]) -> Options:
    """Read ``[serve] [MODEL] [flags]``; flags of vLLM that are not simulated are collected, not refused.

    Raises:
        ProfileInvalid: the profile is not there or not sound.
        FaultsInvalid: the faults cannot be read.
        ContextTooLong: ``--max-model-len`` is more than the KV cache holds.
        SystemExit: a value has the wrong type.
    """
    args, ignored = _parser().parse_known_args(argv)
    profile = _profile(args)
    longest = args.max_model_len or min(_LONGEST_DEFAULT, profile.kv_tokens)
    if longest > profile.kv_tokens:
        raise ContextTooLong(f"one request of {longest} tokens does not fit the KV cache of {profile.kv_tokens} tokens")
    model = next((word for word in args.words if word != "serve"), args.profile)
    limits = Limits(
        names=tuple(args.served_model_name or (model,)),
        max_model_len=longest,
        priorities=args.scheduling_policy == "priority",
    )
    facts = {
        "pid": os.getpid(),
        "accelerator": args.profile,
        "tp": args.tensor_parallel_size,
        "pp": args.pipeline_parallel_size,
        "visible_devices": os.environ.get(VISIBLE_ENV),
        "seed": args.seed,
        "speed": args.speed,
    }
    settings = Settings(
        profile=profile,
        limits=limits,
        seed=args.seed,
        speed=args.speed,
        prefix_caching=args.enable_prefix_caching,
        facts=facts,
    )
    return Options(
        host=args.host,
        port=args.port,
        headless=args.headless,
        settings=settings,
        faults=parse_faults(args.faults),
        ignored=tuple(ignored),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hetero_llm_sim.engine", allow_abbrev=False)
    add = parser.add_argument
    add("words", nargs="*", metavar="[serve] [MODEL]", help="accepted for likeness; only names the model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one, named in the log")
    add("--served-model-name", nargs="+")
    add("--max-model-len", type=int)
    add("--profile", default="fast", help="name of a simulated accelerator")
    add("--profiles", help="YAML file with more profiles; default: HETERO_LLM_SIM_PROFILES")
    add("--tensor-parallel-size", "-tp", type=int, default=1)
    add("--pipeline-parallel-size", "-pp", type=int, default=1)
    add("--max-num-seqs", type=int, help="instead of the profile's max_batch")
    add("--max-num-batched-tokens", type=int, help="instead of the profile's max_batched_tokens")
    add("--max-num-queued-reqs", type=int, help="instead of the profile's max_queued")
    add("--block-size", type=int, help="instead of the profile's block_tokens")
    add("--kv-tokens", type=int, help="instead of the profile's kv_tokens")
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--scheduling-policy", choices=("fcfs", "priority"), default="priority")
    add("--seed", type=int, default=int(os.environ.get(SEED_ENV) or 0), help=f"of the text; default: {SEED_ENV} or 0")
    add("--speed", type=_positive, default=os.environ.get(SPEED_ENV) or "1", help="simulated seconds per second")
    add("--faults", default=os.environ.get(FAULTS_ENV, ""), help=f"faults to start with; default: {FAULTS_ENV}")
    add("--headless", action="store_true", help="serve nothing: another node of the group does")
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _profile(args: argparse.Namespace) -> Profile:
    profile = load_profiles(args.profiles).find(args.profile)
    profile = profile.of_group(args.tensor_parallel_size, args.pipeline_parallel_size)
    given = {
        "max_batch": args.max_num_seqs,
        "max_batched_tokens": args.max_num_batched_tokens,
        "max_queued": args.max_num_queued_reqs,
        "block_tokens": args.block_size,
        "kv_tokens": args.kv_tokens,
    }
    return replace(profile, **{name: value for name, value in given.items() if value is not None})
