"""Level 1 of the kit finds what a backend does wrong with sick devices; the good plugin passes it all."""

import pytest
from broken_plugin import checks, discovery, engine, good_plugin, outcome_of_broken, outcomes

FOUND = "    devices.sort(key=lambda device: device.index)\n"
PROBLEM_OF_A_LINE = '            problems.append(_problem(f"{TOOL} says {line!r}: {error}"))\n'

pytestmark = pytest.mark.slow


BROKEN = {
    "memory in the wrong unit": (
        discovery("return int(mib) << 20", "return int(mib) << 10"),
        "the fake devices are found as they are",
    ),
    "a healthy device is called unknown": (
        discovery('"ok": Health.OK, ', ""),
        "the fake devices are found as they are",
    ),
    "the identity is the number": (
        discovery('uid=f"{KIND}-{serial}"', 'uid=f"{KIND}-{index}"'),
        "the fake devices are found as they are",
    ),
    "the last device is forgotten": (
        discovery(FOUND, f"    devices = devices[:1]\n{FOUND}"),
        "the fake devices are found as they are",
    ),
    "a problem where there is none": (
        discovery(FOUND, f'    problems.append(_problem("none"))\n{FOUND}'),
        "the fake devices are found as they are",
    ),
    "an identity by chance": (
        discovery('uid=f"{KIND}-{serial}"', "uid=f\"{serial}-{__import__('secrets').token_hex(4)}\""),
        "a second discovery gives every device the same identity",
    ),
    "one faulty device fails the whole pass": (
        discovery(PROBLEM_OF_A_LINE, "            return Discovery(problems=(_problem(str(error)),))\n"),
        "a faulty device hides and renumbers no other[0]",
    ),
    "devices behind a faulty one are renumbered": (
        discovery(
            FOUND,
            "    from dataclasses import replace\n\n"
            "    devices = [replace(device, index=n) for n, device in enumerate(devices)]\n",
        ),
        "a faulty device hides and renumbers no other[0]",
    ),
    "a faulty device is dropped in silence": (
        discovery(PROBLEM_OF_A_LINE, "            del error\n"),
        "a faulty device is told of and never called healthy[1]",
    ),
    "a faulty device is called healthy": (
        discovery(
            PROBLEM_OF_A_LINE,
            '            devices.append(Device(kind=KIND, accelerator="A1", uid="x", '
            "index=int(line[0]), health=Health.OK))\n            problems.append(_problem(str(error)))\n",
        ),
        "a faulty device is told of and never called healthy[0]",
    ),
    "readings in an order of its own": (
        discovery(
            "for device in devices)\n\n\ndef _ask",
            "for device in sorted(devices, key=lambda device: device.index))\n\n\ndef _ask",
        ),
        "usage reads every device in the order asked",
    ),
    "a reading of a device that is gone is an exception": (
        discovery("_used_bytes(seen.get(device.uid))", "_used_bytes(seen[device.uid])"),
        "usage goes on when a device is faulty",
    ),
    "doctor is silent about what to do with a faulty device": (
        checks("text=first.text, next=first.next)", "text=first.text)"),
        "doctor speaks of a faulty machine in the documented shape",
    ),
    "a hanging tool is passed over in silence": (
        discovery(
            "        return Discovery(problems=(_problem(str(error)),), source=TOOL)",
            "        return Discovery()",
        ),
        "a driver that hangs costs the deadline and leaves nothing behind",
    ),
    "a hanging tool is an exception": (
        discovery("    except ToolFailed as error:", "    except ZeroDivisionError as error:"),
        "a driver that hangs costs the deadline and leaves nothing behind",
    ),
    "a hanging tool outlives its caller": (
        discovery("timeout=_DEADLINE_S, check=False", "start_new_session=True, check=False"),
        "a driver that hangs costs the deadline and leaves nothing behind",
    ),
    "an engine for found devices is an exception": (
        engine("    if wrong := checks", '    {"example": 0}[spec.devices[0].accelerator]\n    if wrong := checks'),
        "engines start on the devices that were found",
    ),
    "an engine of another version is taken": (
        checks(
            "    found = _vllm_version()\n    if found is None or found",
            "    found = _vllm_version()\n    if found",
        ),
        checks('.startswith(f"{VLLM}.")', " != 'x'"),
        "an engine of another version is refused with both versions",
    ),
}


def test_a_context_that_stays_open_is_found(tmp_path):
    folder = good_plugin(tmp_path)
    with (folder / "tests" / "test_contract.py").open("a") as file:
        file.write("\n\nTestAcme.open_contexts = lambda self: 1\n")
    assert outcomes(folder, 1)["discovery and usage leave no context open"] == "failed"


def test_the_good_plugin_keeps_every_promise(tmp_path):
    assert "failed" not in outcomes(good_plugin(tmp_path), 1).values()


@pytest.mark.parametrize("mutant", BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_fails_the_test_that_names_it(tmp_path, mutant):
    assert outcome_of_broken(tmp_path, mutant, 1) == "failed"
