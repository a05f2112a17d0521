"""Level 2 of the kit on the kind every machine has: a real vLLM generates a token, real ranks meet over Gloo."""

import json
import subprocess
import sys

import pytest


@pytest.mark.vllm
@pytest.mark.slow
def test_level_2_starts_a_real_engine_and_lets_two_devices_meet():
    words = ("plugins", "check", "cpu", "--level", "2", "-o", "json")
    done = subprocess.run(
        [sys.executable, "-m", "hetero_llm.cli", *words], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = {test["test"]: test for test in json.loads(done.stdout)["data"]["tests"] if test["level"] == 2}
    assert tests.pop("the devices of this machine are found")["outcome"] == "passed"
    assert tests.pop("an engine starts on a device and generates a token")["outcome"] == "passed"
    meeting = tests.pop("two devices meet in the pre flight")
    assert meeting["outcome"] == "passed" or "1 healthy cpu devices here" in meeting["text"]
    assert not tests
