"""What a rank of the pre-flight says about itself, up to the point where torch is needed."""

import json
import os
import subprocess
import sys

import pytest

from hetero_llm.plugin.rank_line import RankLine, one_line, parse_line

VARIABLES = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
# The form in which torch passes on what NCCL says when a peer's port cannot be reached.
NCCL = """NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled system error (run with \
NCCL_DEBUG=INFO for details), NCCL version 2.20.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 10.0.0.2<43215> failed : Software caused connection abort
Exception raised from getNCCLComm at ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f in /usr/lib/libc10.so)"""


def program(*arguments, **variables):
    """Run one rank to its end; return its exit status and the lines it printed on stdout and stderr."""
    env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "hetero_llm.plugin.preflight", *arguments],
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


@pytest.mark.parametrize("missing", list(VARIABLES))
def test_a_rank_without_a_variable_fails_naming_it(missing):
    given = {name: value for name, value in VARIABLES.items() if name != missing}
    code, out, err = program("--backend", "gloo", "--device", "cpu", **given)
    last = json.loads(err[-1])
    assert (code, out) == (1, [])
    assert (last["preflight"], last["phase"]) == ("failed", "variables")
    assert last["cause"] == f"the variable {missing} is not set"


def test_a_variable_that_is_no_number_is_shown():
    _, _, err = program("--backend", "gloo", "--device", "cpu", **{**VARIABLES, "WORLD_SIZE": "two"})
    assert json.loads(err[-1])["cause"] == "the variable WORLD_SIZE must be a whole number, not 'two'"


def test_a_failure_names_rank_interface_and_backend_before_anything_is_loaded():
    variables = {**VARIABLES, "HCCL_SOCKET_IFNAME": "enp1s0,enp2s0", "GLOO_SOCKET_IFNAME": "lo"}
    _, _, err = program("--backend", "hccl", "--device", "npu", "--import", "no_such_module", **variables)
    line = parse_line(err[-1])
    assert line is not None
    assert (line.rank, line.backend, line.interfaces) == (3, "hccl", ("enp1s0", "enp2s0"))


def test_without_a_stated_interface_the_one_the_kernel_would_take_is_named():
    _, _, err = program("--backend", "hccl", "--device", "npu", "--import", "no_such_module", **VARIABLES)
    assert json.loads(err[-1])["interfaces"] == ["lo"]


def test_a_backend_must_be_named():
    code, _, err = program("--device", "cpu", **VARIABLES)
    assert code == 2
    assert "--backend" in err[-1]


@pytest.mark.parametrize("text", ["", "hello", '{"other": 1}', '{"preflight": "passed"', '{"preflight":"passed"}'])
def test_other_output_is_not_taken_for_a_line_of_the_protocol(text):
    assert parse_line(text) is None


def test_a_line_gives_back_what_was_said():
    text = '{"preflight":"passed","phase":"done","rank":2,"backend":"gloo","bandwidth_bytes_per_s":1e9}'
    assert parse_line(text) == RankLine(
        preflight="passed", phase="done", rank=2, backend="gloo", bandwidth_bytes_per_s=1e9
    )


def test_what_really_happened_to_nccl_comes_first_and_the_stack_is_left_out():
    cause = one_line(NCCL)
    assert cause.startswith(
        "socketStartConnect: Connect to 10.0.0.2<43215> failed : Software caused connection abort ("
    )
    assert "unhandled system error" in cause
    assert "frame" not in cause
    assert "\n" not in cause


def test_a_long_error_is_cut():
    assert len(one_line("word " * 1000)) <= 800
