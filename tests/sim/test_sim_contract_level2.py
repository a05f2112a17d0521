"""Level 2 of the contract on the simulated kind: a real engine process is started, asked for a token, and ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

CONTRACT = Path(__file__).parent / "test_sim_contract.py"


def test_level_2_starts_the_engine_and_sees_a_token():
    words = ("plugins", "check", "sim", "--level", "2", "--contract", str(CONTRACT), "-o", "json")
    done = subprocess.run(
        [sys.executable, "-m", "hetero_llm.cli", *words],
        env={**os.environ, "HETERO_LLM_SIM_DEVICES": "fast,fast", "HETERO_LLM_CONTRACT_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tests = {test["test"]: test for test in json.loads(done.stdout)["data"]["tests"] if test["level"] == 2}
    assert {name: test["outcome"] for name, test in tests.items()} == {
        "the devices of this machine are found": "passed",
        "an engine starts on a device and generates a token": "passed",
        "two devices meet in the pre flight": "skipped",
    }
