"""Level 0 of the kit finds what is wrong with groups, engine commands, and the judgement of models."""

import pytest
from broken_plugin import engine, group, outcome_of_broken, plugin

pytestmark = pytest.mark.slow


def flags(expression):
    """The words of the engine's command behind the model."""
    return engine(
        "    return (*vllm_flags.serve_flags(spec), *share, *memory, *vllm_flags.user_flags(spec))",
        f"    return {expression}",
    )


BROKEN = {
    "a rank is not told its number": (
        group('        "RANK": str(rank.rank),\n', ""),
        "every rank is told who it is and where to meet[2-1]",
    ),
    "local ranks go on over nodes": (
        group("if other.node == rank.node]", "]"),
        "every rank is told who it is and where to meet[4-2]",
    ),
    "ranks meet at their own address": (
        group('"MASTER_ADDR": spec.master_address', '"MASTER_ADDR": rank.address'),
        "every rank is told who it is and where to meet[4-2]",
    ),
    "a rank gets another vendor's variable": (
        group('"MASTER_PORT":', '"HIP_VISIBLE_DEVICES": "0",\n        "MASTER_PORT":'),
        "no rank is given a variable of another vendor[2-1]",
    ),
    "gloo steps in between nodes": (
        group("torch_backend=BACKEND", 'torch_backend=BACKEND if len(spec.ranks) < 4 else "gloo"'),
        "the collective library is named and the same for every shape",
    ),
    "names to remove are no tuple": (
        group("env_remove=(*engine.OTHER_VISIBLE_ENVS, *vllm_flags.STALE_ENVS)", 'env_remove="RANK"'),
        "variables to remove are named",
    ),
    "one rank waits for others": (
        group("preflight if len(spec.ranks) > 1 else None", "preflight"),
        "one rank needs no pre flight",
    ),
    "several ranks are not tried out": (
        group("preflight if len(spec.ranks) > 1 else None", "None"),
        "several ranks are tried out by a program before the engine starts",
    ),
    "the pre-flight has no deadline": (
        group(', "--deadline-s", f"{spec.deadline_s:g}")', ")"),
        "the pre flight is told its deadline",
    ),
    "the engine's program is looked up on PATH": (
        engine("argv=(sys.executable,", 'argv=("python",'),
        "the engines command and patterns are in the documented shape",
    ),
    "the engine's program is not there": (
        engine("argv=(sys.executable,", 'argv=("/no/such/python",'),
        "the engines command and patterns are in the documented shape",
    ),
    "a message asks for a group too many": (
        engine("root_causes=vllm_log.ROOT_CAUSES", 'root_causes=(vllm_log.cause("E(1)", "it is {2}"),)'),
        "the engines command and patterns are in the documented shape",
    ),
    "a message names its groups": (
        engine("root_causes=vllm_log.ROOT_CAUSES", 'root_causes=(vllm_log.cause("E(1)", "it is {code}"),)'),
        "the engines command and patterns are in the documented shape",
    ),
    "the command does not serve": (
        engine('"serve", spec.model_path', '"--model", spec.model_path'),
        "the command says serve and then the model",
    ),
    "the model comes later": (
        engine('"serve", spec.model_path, *_flags(spec)', '"serve", *_flags(spec), spec.model_path'),
        "the command says serve and then the model",
    ),
    "the port is the engine's own": (
        flags('(*vllm_flags.serve_flags(spec), "--port", "1", *share, *memory, *vllm_flags.user_flags(spec))'),
        "the command passes on what was asked[--port]",
    ),
    "the parallel size is lost": (
        flags('("--host", spec.host, "--port", str(spec.port), *vllm_flags.user_flags(spec))'),
        "the command passes on what was asked[--tensor-parallel-size]",
    ),
    "the user's flags lose": (
        flags("(*vllm_flags.user_flags(spec), *vllm_flags.serve_flags(spec), *share, *memory)"),
        "the users own flags come last so that they win",
    ),
    "the configuration is ignored": (
        flags("(*vllm_flags.serve_flags(spec), *share, *memory, *spec.extra_args)"),
        "settings of the configuration become flags",
    ),
    "the engine is not told its devices": (
        engine(
            "env={**device_env(vllm_flags.local_devices(spec)), **vllm_flags.serve_env(spec)}",
            "env=vllm_flags.serve_env(spec)",
        ),
        "the engine gets its devices variables and no other vendors",
    ),
    "the engine keeps another vendor's variable": (
        engine("env_remove=(*OTHER_VISIBLE_ENVS, ", "env_remove=("),
        "the engine gets its devices variables and no other vendors",
    ),
    "two engines share their devices": (
        engine("device_env(vllm_flags.local_devices(spec))", 'device_env(spec.devices), VISIBLE_ENV: "0,1"'),
        "two replicas of one node share no device and no port",
    ),
    "a command by chance": (
        flags('(*vllm_flags.serve_flags(spec), "--seed", __import__("secrets").token_hex(4), *spec.extra_args)'),
        "the same engine asked twice has the same command",
    ),
    "the core's environment is changed": (
        engine(
            "    if wrong := checks",
            '    __import__("os").environ["ACME_SEEN"] = "1"\n    if wrong := checks',
        ),
        "making the command changes and loads nothing",
    ),
    "the core's process loads an engine": (
        engine("    if wrong := checks", "    import sglang\n\n    if wrong := checks"),
        "making the command changes and loads nothing",
    ),
    "every node serves": (
        engine("headless=spec.node_rank > 0", "headless=False"),
        "over two nodes only the first serves and each has its own devices[1]",
    ),
    "every node has the first one's devices": (
        engine("device_env(vllm_flags.local_devices(spec))", "device_env(spec.devices[:2])"),
        "over two nodes only the first serves and each has its own devices[1]",
    ),
    "a rule nobody knows": (
        plugin('rule="dtype"', 'rule="weights"'),
        "refusals of a model have a known rule and a reason[full]",
    ),
    "a refusal names a node": (
        plugin('node=""', 'node="here"'),
        "refusals of a model have a known rule and a reason[full]",
    ),
    "a refusal without a reason": (
        plugin("reason=reason),)", 'reason=""),)'),
        "refusals of a model have a known rule and a reason[full]",
    ),
    "a refusal of another accelerator": (
        plugin("accelerator=accelerator", 'accelerator="A9"'),
        "refusals of a model have a known rule and a reason[full]",
    ),
    "an unheard-of dtype is an exception": (
        plugin(
            "        if facts.dtype in DTYPES:",
            '        {"float32": 4, "float16": 2, "bfloat16": 2}[facts.dtype]\n        if facts.dtype in DTYPES:',
        ),
        "refusals of a model have a known rule and a reason[unheard-of]",
    ),
    "a model is judged by chance": (
        plugin(
            '        if facts.dtype in DTYPES:\n            return ()\n        reason = f"',
            '        reason = f"{__import__("secrets").token_hex(4)}',
        ),
        "the same model is judged the same twice",
    ),
    "overhead is a fraction": (
        plugin("return OVERHEAD_BYTES", "return OVERHEAD_BYTES / tp"),
        "memory beside weights and cache is whole bytes[1-1]",
    ),
    "overhead is negative": (
        plugin("return OVERHEAD_BYTES", "return -OVERHEAD_BYTES"),
        "memory beside weights and cache is whole bytes[1-1]",
    ),
}


@pytest.mark.parametrize("mutant", BROKEN.values(), ids=BROKEN)
def test_a_broken_promise_fails_the_test_that_names_it(tmp_path, mutant):
    assert outcome_of_broken(tmp_path, mutant, 0) == "failed"
