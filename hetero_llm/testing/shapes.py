"""The shape of every value a backend returns; each check fails with the thing, what it is, and what it should be."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import Formatter

from hetero_llm.errors import error_class
from hetero_llm.plugin import (
    Check,
    Device,
    DeviceUsage,
    EngineLaunch,
    Health,
    Problem,
    Rejection,
    RootCausePattern,
)

RULES = frozenset(
    {
        "kind",
        "health",
        "in-use",
        "memory",
        "heads",
        "dtype",
        "feature",
        "version",
        "topology",
        "pairing",
        "count",
        "node",
        "label",
    }
)
"""Names a rejection's `rule` may have; the planner and its readers know no others."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_line(what: str, text: object) -> None:
    """Check for one line of text that says something."""
    assert isinstance(text, str), f"{what} is {text!r}, not text"
    assert text.strip(), f"{what} is empty"
    assert "\n" not in text.strip(), f"{what} has several lines: {text!r}"


def check_lines(what: str, texts: object) -> None:
    """Check for a tuple of lines."""
    assert isinstance(texts, tuple), f"{what} is {type(texts).__name__}, not a tuple"
    for text in texts:
        check_line(what, text)


def check_devices(kind: str, devices: Sequence[Device]) -> None:
    """Check a node's devices: each in shape, ascending and unique by `index`, unique by `uid`."""
    for device in devices:
        check_device(kind, device)
    indices = [device.index for device in devices]
    assert indices == sorted(set(indices)), f"devices are numbered {indices}: not ascending, or a number twice"
    uids = [device.uid for device in devices]
    assert len(set(uids)) == len(uids), f"a uid appears twice: {uids}"
    for device in devices:
        strangers = set(device.links) - {str(index) for index in indices}
        assert not strangers, f"device {device.index} has links to {sorted(strangers)}, which are no devices here"


def check_device(kind: str, device: Device) -> None:
    """Check one device."""
    where = f"device {device.index}"
    assert device.kind == kind, f"{where} is of kind {device.kind!r}, the backend of {kind!r}"
    assert _NAME.fullmatch(device.accelerator), (
        f"{where}: accelerator {device.accelerator!r} must be 1 to 63 of A-Z a-z 0-9 . _ - to be a Ray resource"
    )
    check_line(f"{where}: uid", device.uid)
    assert type(device.index) is int, f"{where}: index is no whole number"
    assert device.index >= 0, f"{where}: index is below 0"
    assert isinstance(device.health, Health), f"{where}: health {device.health!r} is no Health"
    for name in ("memory_bytes", "free_bytes"):
        value = getattr(device, name)
        assert value is None or type(value) is int, f"{where}: {name} is {value!r}, neither whole bytes nor None"
    # The smallest accelerator anybody serves a model on has gigabytes: less is a wrong unit or an invented number.
    total_bytes, free_bytes = device.memory_bytes, device.free_bytes
    assert total_bytes is None or total_bytes >= 1 << 20, (
        f"{where}: {total_bytes} bytes of memory; None if not measured"
    )
    assert free_bytes is None or free_bytes >= 0, f"{where}: {free_bytes} bytes are free"
    if total_bytes is not None and free_bytes is not None:
        assert free_bytes <= total_bytes, f"{where}: {free_bytes} of {total_bytes} bytes are free"
    assert list(device.cores) == sorted(set(device.cores)), f"{where}: cores {device.cores} are not ascending"


def check_problem(kind: str, problem: Problem) -> None:
    """Check a problem of discovery: whose it is, a code that `hetero-llm explain` knows, and a way out."""
    assert problem.kind == kind, f"the problem {problem.text!r} is of kind {problem.kind!r}, the backend of {kind!r}"
    assert error_class(problem.code) is not None, f"{problem.code!r} is no code of hetero-llm; HL203 is a failed query"
    check_line("a problem's text", problem.text)
    assert problem.next, f"the problem {problem.text!r} does not say what to do"
    check_lines(f"what to do about {problem.text!r}", problem.next)


def check_check(kind: str, check: Check) -> None:
    """Check one result of `doctor`."""
    assert isinstance(check, Check), f"doctor() gave {type(check).__name__}, not Check"
    check_line("a check's name", check.name)
    assert check.name.startswith(f"{kind}."), f"the check {check.name!r} must be named {kind}.SOMETHING"
    assert check.ok is None or type(check.ok) is bool, f"{check.name}: ok is {check.ok!r}"
    check_line(f"{check.name}: text", check.text)
    check_lines(f"{check.name}: next", check.next)
    assert check.ok is not False or check.next, f"{check.name} fails ({check.text}) and does not say what to do"
    assert check.ok is not True or not check.next, f"{check.name} is fine and yet says what to do"


def check_usage(devices: Sequence[Device], readings: Sequence[DeviceUsage]) -> None:
    """Check one reading per device, in their order, nothing below zero."""
    uids, read = [device.uid for device in devices], [reading.uid for reading in readings]
    assert read == uids, f"usage() gave readings of {read} for the devices {uids}"
    for reading in readings:
        for name in ("used_bytes", "utilization", "power_w"):
            value = getattr(reading, name)
            assert value is None or value >= 0, f"{name} of {reading.uid} is {value}; None if not measured"


def check_env(what: str, env: object) -> None:
    """Check a set of variables: names and values are text that a process can be given."""
    assert isinstance(env, Mapping), f"{what} is {type(env).__name__}, not a mapping"
    for name, value in env.items():
        assert isinstance(name, str), f"{what}: {name!r} is not text"
        assert _VARIABLE.fullmatch(name), f"{what}: {name!r} is no name of a variable"
        assert isinstance(value, str), f"{what}: {name} is {value!r}, not text"
        assert "\0" not in value, f"{what}: {name} holds a zero byte"


def check_names(what: str, names: object) -> None:
    """Check a tuple of variable names."""
    assert isinstance(names, tuple), f"{what} is {type(names).__name__}, not a tuple"
    for name in names:
        assert isinstance(name, str), f"{what} holds {name!r}"
        assert _VARIABLE.fullmatch(name), f"{what} holds {name!r}"


def check_rejection(kind: str, accelerator: str, rejection: Rejection) -> None:
    """Check a rejection of `check_model`: the planner fills in the node, everything else is there."""
    assert isinstance(rejection, Rejection), f"check_model() gave {type(rejection).__name__}, not Rejection"
    assert rejection.rule in RULES, f"the rule {rejection.rule!r} is none of {', '.join(sorted(RULES))}"
    assert rejection.node == "", f"the rejection names the node {rejection.node!r}; the planner fills that in"
    assert (rejection.kind, rejection.accelerator) == (kind, accelerator), (
        f"asked about {kind} {accelerator}: {rejection}"
    )
    check_line(f"the reason of a rejection by {rejection.rule}", rejection.reason)


def check_launch(launch: EngineLaunch) -> None:
    """Check an engine's command, its variables, and the patterns that read its log."""
    assert isinstance(launch, EngineLaunch), f"engine() gave {type(launch).__name__}, not EngineLaunch"
    check_argv("the engine's command", launch.argv)
    check_env("the engine's variables", launch.env)
    check_names("env_remove of the engine", launch.env_remove)
    assert list(launch.cores) == sorted(set(launch.cores)), f"cores {launch.cores} are not ascending"
    assert launch.health_path.startswith("/"), f"health_path {launch.health_path!r} does not begin with /"
    assert launch.start_deadline_s > 0, f"start_deadline_s is {launch.start_deadline_s}"
    for marker in launch.phases:
        check_line("the name of a phase", marker.phase)
    for fact in launch.facts:
        assert fact.pattern.groups >= 1, f"the pattern of the fact {fact.name!r} has no group to take the number from"
    for cause in launch.root_causes:
        check_root_cause(cause)


def check_argv(what: str, argv: object) -> None:
    """Check a command line: text only, the program with its whole path."""
    assert isinstance(argv, tuple), f"{what} is {type(argv).__name__}, not a tuple"
    assert all(isinstance(word, str) for word in argv), f"{what} has words that are not text: {argv}"
    assert argv, f"{what} is empty"
    assert argv[0].startswith("/"), f"{what} must begin with an absolute path, not {argv[0]!r}"


def check_root_cause(cause: RootCausePattern) -> None:
    """Check that message and advice ask only for groups the pattern has."""
    for text in (cause.message, *cause.next):
        for _, field, _, _ in Formatter().parse(text):
            number = re.match(r"\d+", field or "")
            asked = int(number[0]) if number else 0
            assert field is None or number, f"{text!r} must name groups by number, {{1}}, not {{{field}}}"
            assert asked <= cause.pattern.groups, f"{text!r} asks for group {asked} of {cause.pattern.pattern!r}"
