"""An engine that cannot start, and stopping while it starts: the root cause in one line, nothing left running."""

import json
import os
import shutil
import signal

import psutil
import pytest
from sandbox import engine_tree

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = ("--max-model-len", "512", "--kv-cache-bytes", "64MiB")


def fails(sandbox, *args):
    serve = sandbox.serve(*args)
    assert serve.wait(timeout_s=280.0) == 1, serve.log
    assert sandbox.leftovers() == []
    return serve.error()


def test_a_head_size_no_cpu_kernel_has_is_refused_before_anything_starts(sandbox, tiny_model):
    error = fails(sandbox, str(tiny_model("head16")), "--kind", "cpu", *SIZES)
    assert error["code"] == "HL305"
    assert "head" in error["message"] + (error["cause"] or "")
    assert "16" in error["message"] + (error["cause"] or "")


def test_a_bad_engine_flag(sandbox, tiny_model):
    error = fails(sandbox, str(tiny_model("tiny-qwen2")), "--kind", "cpu", *SIZES, "--", "--no-such-flag")
    assert error["code"] == "HL501"
    assert "--no-such-flag" in error["message"]
    assert "hetero-llm logs" in " ".join(error["next"])


def test_a_folder_without_weights(sandbox, tiny_model, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model("tiny-qwen2"), bare, ignore=shutil.ignore_patterns("*.safetensors"))
    error = fails(sandbox, str(bare), "--kind", "cpu")
    assert error["code"] == "HL302"
    assert "weights" in error["message"] + (error["cause"] or "")


def test_more_memory_than_there_is_is_refused_by_the_plan(sandbox, tiny_model):
    error = fails(sandbox, str(tiny_model("tiny-qwen2")), "--kind", "cpu", "--kv-cache-bytes", "4TiB")
    assert error["code"] == "HL305"
    assert "memory" in (error["cause"] or "")


def test_more_memory_than_there_is_asked_of_the_engine_itself(sandbox, tiny_model):
    flag = ("--", "--kv-cache-memory-bytes", str(4 << 40))
    error = fails(sandbox, str(tiny_model("tiny-qwen2")), "--kind", "cpu", "--max-model-len", "512", *flag)
    assert error["code"] == "HL501"
    assert "KV cache needs 4096.0 GiB" in error["message"]


def test_an_unknown_model(sandbox):
    error = fails(sandbox, "smollm2-136m")
    assert error["code"] == "HL301"
    assert "smollm2-135m" in json.dumps(error)


def test_ctrl_c_while_the_engine_loads_leaves_nothing_behind(sandbox, tiny_model):
    serve = sandbox.serve(str(tiny_model("tiny-qwen2")), "--kind", "cpu", *SIZES)
    serve.wait_for_log("starting the workers")
    serve.interrupt()
    assert serve.wait() == 130
    assert sandbox.leftovers() == []


def test_ctrl_c_while_the_cluster_starts_leaves_nothing_behind(sandbox, tiny_model):
    serve = sandbox.serve(str(tiny_model("tiny-qwen2")), "--kind", "cpu", *SIZES)
    serve.wait_for_log("starting a local cluster")
    serve.interrupt()
    assert serve.wait() == 130
    assert sandbox.leftovers() == []


def test_a_killed_serve_leaves_no_engine_and_the_next_command_tidies_up(sandbox, tiny_model):
    serve = sandbox.serve(str(tiny_model("tiny-qwen2")), "--kind", "cpu", *SIZES)
    serve.wait_ready()
    engine = engine_tree(serve.replicas()[0]["actor_pid"])
    assert len(engine) >= 3
    serve.process.kill()
    serve.process.wait()
    _gone, alive = psutil.wait_procs(engine, timeout=15.0)
    assert alive == []
    assert [path.name for path in sandbox.tmp.glob("hetero-ray-*")]
    assert sandbox.run("status").returncode == 1
    assert not [path.name for path in sandbox.tmp.glob("hetero-ray-*")]
    # Ray's agents need a minute to notice; nothing else is left.
    assert [thing for thing in sandbox.leftovers() if not thing.startswith("process")] == []


SIMULATED = ("--kind", "sim", "--max-model-len", "512", "--address", "local")
SIM_DEVICE = {"HETERO_LLM_SIM_DEVICES": "fast=1", "HETERO_LLM_SIM_NODE": "mine"}


def test_a_detached_serve_is_ready_when_the_command_returns_and_ends_with_stop(sandbox, tiny_model):
    words = (str(tiny_model("tiny-qwen2")), *SIMULATED, "--port", "0", "--detach", "-o", "json")
    done = sandbox.run("serve", *words, timeout_s=280.0, **SIM_DEVICE)
    assert done.returncode == 0, done.stderr
    ready = json.loads(done.stdout)["data"]
    status = sandbox.json("status")
    assert [replica["state"] for replica in status["replicas"]] == ["ready"]
    stopped = sandbox.run("stop", ready["models"][0])
    assert stopped.returncode == 0, stopped.stderr
    assert sandbox.leftovers() == []


def test_a_signal_to_all_its_processes_at_once_ends_it_and_leaves_nothing(sandbox, tiny_model):
    """What systemd does by default, and `timeout`: Ray's processes end before they can be asked anything."""
    serve = sandbox.serve(str(tiny_model("tiny-qwen2")), *SIMULATED, env=SIM_DEVICE)
    serve.wait_ready()
    os.killpg(serve.process.pid, signal.SIGTERM)
    assert serve.wait(50.0) == 130
    assert sandbox.leftovers() == []
