"""Level 0 of the kit finds what is wrong with an import, facts, discovery, and a process's variables."""

import os

import pytest
from broken_plugin import at_import, checks, discovery, engine, outcome_of_broken, plugin

NO_TOOL = "    if tool is None:\n        return Discovery()\n"
DEVICE = 'Device(kind=KIND, accelerator="A1", uid=f"u{n}", index=n, health=Health.OK)'
DEVICE_FILES = ("/dev/kmsg", "/dev/fuse", "/dev/loop-control", "/dev/net/tun")
ADVICE = ', next=("mend it",)'
PROBLEM = 'Problem(kind=KIND, code="HL203", text="it is broken", next=("mend it",))'

pytestmark = pytest.mark.slow


def finds_here(expression):
    """A machine without the vendor's tool on which `expression` is found all the same."""
    return discovery(NO_TOOL, f"    if tool is None:\n        return {expression}\n")


def finds_devices(device=DEVICE):
    """The same with two devices."""
    return finds_here(f"Discovery(devices=tuple({device} for n in (0, 1)), source='x')")


def device_env(expression):
    return engine('return {VISIBLE_ENV: ",".join(', f'return {expression}\n    return {{VISIBLE_ENV: ",".join(')


BROKEN = {
    "a driver library is opened at import": (
        at_import('import ctypes\nctypes.CDLL("libc.so.6")'),
        "importing the plugin loads no vendor library",
    ),
    "a vendor's module is loaded at import": (
        at_import("import pyrsmi"),
        "importing the plugin loads no vendor library",
    ),
    "a variable is set at import": (
        at_import('import os\nos.environ["ACME_X"] = "1"'),
        "importing the plugin changes no variable",
    ),
    "the import fails": (at_import("import no_such_module_of_acme"), "importing the plugin works"),
    "a newer API is wanted": (
        plugin('api_version = "1.0"', 'api_version = "1.9"'),
        "the plugin api it was written for is served here",
    ),
    "the class is not the one that is installed": (
        plugin("return (AcmeBackend(),)", "return ()"),
        "the plugin is found by its entry point and loaded",
    ),
    "the kind is no kind": (
        discovery('KIND = "acme"', 'KIND = "acme-1"'),
        "the kind is a short lower case word",
    ),
    "the counter of the core is claimed": (
        plugin("native_resource = None", 'native_resource = "hetero_acme"'),
        "a native resource is one ray can count",
    ),
    "Ray hands out ids that nothing takes": (
        plugin(
            "native_resource = None\n    visible_devices_env = engine.VISIBLE_ENV\n",
            'native_resource = "ACME"\n    visible_devices_env = None\n',
        ),
        "a native resource is one ray can count",
    ),
    "its own variable is cleared": (
        plugin(
            "other_visible_envs = engine.OTHER_VISIBLE_ENVS",
            "other_visible_envs = (*engine.OTHER_VISIBLE_ENVS, engine.VISIBLE_ENV)",
        ),
        "variables are named and its own is not among those it clears",
    ),
    "another vendor's variable stays": (
        engine('    "HIP_VISIBLE_DEVICES",\n', ""),
        "the variables of other vendors are cleared",
    ),
    "no tokens in a block": (
        plugin("kv_block_tokens = 16", "kv_block_tokens = 0"),
        "the kv cache is given in whole blocks and bytes",
    ),
    "an absent driver is an exception": (finds_here("1 / 0"), "discovery here raises nothing"),
    "a list is given for a discovery": (finds_here("[]"), "discovery here raises nothing"),
    "discovery takes longer than anybody waits": (
        plugin(
            "        return discovery.discover()",
            '        __import__("time").sleep(10.1)\n        return discovery.discover()',
        ),
        "discovery here answers before its deadline",
    ),
    "an accelerator has a blank": (
        finds_devices(DEVICE.replace("A1", "A 1")),
        "devices here are in the documented shape",
    ),
    "a number is given twice": (
        finds_devices(DEVICE.replace("index=n", "index=0")),
        "devices here are in the documented shape",
    ),
    "a uid is given twice": (
        finds_devices(DEVICE.replace("u{n}", "u")),
        "devices here are in the documented shape",
    ),
    "memory of one byte is invented": (
        finds_devices(f"{DEVICE[:-1]}, memory_bytes=1)"),
        "devices here are in the documented shape",
    ),
    "more is free than there is": (
        finds_devices(f"{DEVICE[:-1]}, memory_bytes=1 << 30, free_bytes=2 << 30)"),
        "devices here are in the documented shape",
    ),
    "devices of another kind": (
        finds_devices(DEVICE.replace("kind=KIND", "kind=chr(120)")),
        "devices here are in the documented shape",
    ),
    "devices come from nowhere": (
        finds_here(f"Discovery(devices=tuple({DEVICE} for n in (0, 1)))"),
        "what was found names its source",
    ),
    "devices are no tuple": (
        finds_here(f"Discovery(devices=[{DEVICE} for n in (0, 1)], source='x')"),
        "discovery here is the same after pickle and json",
    ),
    "identities change with time": (
        discovery(
            NO_TOOL,
            "    if tool is None:\n        import secrets\n\n        return Discovery(source='x', devices="
            f"tuple({DEVICE.replace('u{n}', 'u{n}{secrets.token_hex(4)}')} for n in (0, 1)))\n",
        ),
        "a second discovery here finds the same devices",
    ),
    "a problem without a way out": (
        finds_here(f"Discovery(problems=({PROBLEM.replace(ADVICE, '')},))"),
        "problems here say what to do",
    ),
    "a problem with a code nobody knows": (
        finds_here(f"Discovery(problems=({PROBLEM.replace('HL203', 'HL000')},))"),
        "problems here say what to do",
    ),
    "a problem of another kind": (
        finds_here(f"Discovery(problems=({PROBLEM.replace('kind=KIND', 'kind=chr(120)')},))"),
        "problems here say what to do",
    ),
    "versions are read by importing the engine": (
        plugin('return {"torch"', 'import sglang\n        return {"torch"'),
        "asking here loads no engine library",
    ),
    "the plugin's version is missing": (
        plugin('"plugin": _installed', '"plugins": _installed'),
        "versions are text or unknown",
    ),
    "a version is a number": (
        plugin('"plugin": _installed("hetero-llm-acme")}', '"plugin": 1.5}'),
        "versions are text or unknown",
    ),
    "a device of this machine has no reading": (
        finds_devices(),
        discovery("for device in devices)\n\n\ndef _ask", "for device in devices[1:])\n\n\ndef _ask"),
        "usage here reads every device in order",
    ),
    "a failed check has no advice": (
        checks('is not on PATH", next=(advice,))', 'is not on PATH")'),
        "doctor here gives a way out for what fails",
    ),
    "a check is not named for the kind": (
        checks('Check(name="acme.tool", ok=False', 'Check(name="tool", ok=False'),
        "doctor here gives a way out for what fails",
    ),
    "two checks have one name": (
        checks("return (tool(), devices(), vllm())", "return (tool(), tool())"),
        "doctor here gives a way out for what fails",
    ),
    "a variable is a number": (
        device_env("{VISIBLE_ENV: devices[0].index}"),
        "the variables of a process are text and name no other vendor",
    ),
    "another vendor's variable is set": (
        device_env('{VISIBLE_ENV: "0", "CUDA_VISIBLE_DEVICES": "0"}'),
        "the variables of a process are text and name no other vendor",
    ),
    "its own variable is not set": (
        device_env('{"ACME_OTHER": str([device.index for device in devices])}'),
        "the variables of a process are text and name no other vendor",
    ),
    "ids in the order Ray gave them": (
        device_env('{VISIBLE_ENV: ",".join(str(device.index) for device in devices)}'),
        "ids in a variable ascend whatever the order of the devices",
    ),
    "blanks between ids": (
        device_env('{VISIBLE_ENV: ", ".join(str(i) for i in sorted(device.index for device in devices))}'),
        "ids in a variable ascend whatever the order of the devices",
    ),
    "ids ascend as text": (
        engine(
            "def device_env",
            "def _as_text(devices):\n    return sorted(str(9 + device.index) for device in devices)\n"
            "\n\ndef device_env",
        ),
        device_env('{VISIBLE_ENV: ",".join(_as_text(devices))}'),
        "ids in a variable ascend whatever the order of the devices",
    ),
    "every rank gets device 0": (device_env('{VISIBLE_ENV: "0"}'), "every device has variables of its own"),
    "variables by chance": (
        engine("import sys\n", "import secrets\nimport sys\n"),
        device_env('{VISIBLE_ENV: str(len(devices)), "ACME_X": secrets.token_hex(4)}'),
        "the same devices give the same variables",
    ),
}


@pytest.mark.parametrize("mutant", BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_fails_the_test_that_names_it(tmp_path, mutant):
    assert outcome_of_broken(tmp_path, mutant, 0) == "failed"


def test_a_device_file_that_stays_open_is_found(tmp_path):
    device = next((path for path in DEVICE_FILES if os.access(path, os.R_OK)), None)
    if device is None:
        pytest.skip(f"none of {', '.join(DEVICE_FILES)} can be opened here")
    opens = f"    if tool is None:\n        import os\n\n        os.open('{device}', os.O_RDONLY)\n"
    mutant = (discovery(NO_TOOL, f"{opens}        return Discovery()\n"), "asking here leaves no device open")
    assert outcome_of_broken(tmp_path, mutant, 0) == "failed"
