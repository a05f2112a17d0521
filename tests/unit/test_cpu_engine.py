"""The command line and environment of the engine, and the process groups of its ranks."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from hetero_llm_cpu import engine
from hetero_llm_cpu.group import group
from hetero_llm_cpu.plugin import CpuBackend

from hetero_llm.plugin import Device, EngineSpec, GroupSpec, ModelFacts, PoolWish, RankSpec
from hetero_llm.plugin.flags import engine_flags
from hetero_llm.plugin.interfaces import interface_of

GIB = 1 << 30


def device(index: int, *cores: int) -> Device:
    return Device(kind="cpu", accelerator="xeon-amx", uid=f"c{index}", index=index, cores=cores, memory_bytes=4 * GIB)


SPEC = EngineSpec(
    model_path="/models/toy",
    served_name="toy",
    devices=(device(0, 0), device(1, 1)),
    tp=2,
    pp=1,
    host="127.0.0.1",
    port=4000,
    max_model_len=2048,
    kv_cache_bytes=GIB,
)


def flag(argv: tuple[str, ...], name: str) -> str:
    """Return the value argparse would use: that of the last occurrence."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


def group_spec(*ranks: RankSpec, master: str = "127.0.0.1") -> GroupSpec:
    return GroupSpec(ranks=ranks, tp=len(ranks), pp=1, master_address=master, master_port=29500, deadline_s=20)


def rank(number: int, node: str = "a", address: str = "127.0.0.1") -> RankSpec:
    return RankSpec(rank=number, node=node, address=address, device=device(number, number))


def test_the_engine_is_started_by_the_backends_own_entry() -> None:
    argv = engine.engine(SPEC).argv
    assert argv[:5] == (sys.executable, "-m", "hetero_llm_cpu.vllm_entry", "serve", "/models/toy")


def test_the_executor_is_never_left_to_vllm() -> None:
    assert flag(engine.engine(SPEC).argv, "--distributed-executor-backend") == "mp"


def test_the_kv_cache_is_always_stated_in_bytes() -> None:
    assert flag(engine.engine(SPEC).argv, "--kv-cache-memory-bytes") == str(GIB)
    unstated = dataclasses.replace(SPEC, kv_cache_bytes=None)
    assert flag(engine.engine(unstated).argv, "--kv-cache-memory-bytes") == str(GIB)


def test_flags_of_the_user_come_last_and_win() -> None:
    spec = dataclasses.replace(SPEC, extra_args=("--max-model-len", "512"), options={"max_model_len": 1024})
    argv = engine.engine(spec).argv
    assert flag(argv, "--max-model-len") == "512"
    assert argv[-2:] == ("--max-model-len", "512")


def test_each_rank_gets_its_own_list_of_cores() -> None:
    launch = engine.engine(SPEC)
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert launch.cores == (0, 1)


def test_one_thread_per_physical_core_is_bound(tmp_path: Path) -> None:
    for cpu in range(8):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}")
    assert engine.bind_string([device(0, 0, 1, 4, 5), device(1, 2, 3, 6, 7)], tmp_path) == "0,1|2,3"


def test_a_core_stays_free_of_openmp_where_there_are_no_siblings(tmp_path: Path) -> None:
    assert engine.bind_string([device(0, 0, 1, 2, 3)], tmp_path) == "0,1,2"


def test_variables_of_other_vendors_and_of_an_outer_group_do_not_reach_the_engine() -> None:
    removed = engine.engine(SPEC).env_remove
    assert {"CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "RANK_TABLE_FILE", "MASTER_ADDR"} <= set(removed)
    assert not set(removed) & set(engine.engine(SPEC).env)


def test_nothing_is_reported_home_and_a_local_folder_needs_no_hub(tmp_path: Path) -> None:
    env = engine.engine(dataclasses.replace(SPEC, model_path=str(tmp_path))).env
    assert (env["VLLM_NO_USAGE_STATS"], env["DO_NOT_TRACK"], env["HF_HUB_OFFLINE"]) == ("1", "1", "1")


def test_ranks_on_one_node_meet_on_loopback() -> None:
    env = engine.engine(SPEC).env
    assert (env["VLLM_HOST_IP"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_the_second_node_of_a_group_is_headless_and_binds_its_own_cores() -> None:
    spec = dataclasses.replace(SPEC, node_count=2, node_rank=1, master_address="10.0.0.1", master_port=5000)
    launch = engine.engine(spec)
    assert launch.headless
    assert "--headless" in launch.argv
    assert (flag(launch.argv, "--nnodes"), flag(launch.argv, "--master-port")) == ("2", "5000")
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert launch.cores == (1,)


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"max_num_seqs": 8}, ("--max-num-seqs", "8")),
        ({"enable_prefix_caching": True}, ("--enable-prefix-caching",)),
        ({"enable_prefix_caching": False}, ("--no-enable-prefix-caching",)),
        ({"additional_config": {"a": 1}}, ("--additional-config", '{"a": 1}')),
        ({"seed": None}, ()),
        ({"middleware": ["a", "b"]}, ("--middleware", "a", "b")),
    ],
)
def test_settings_of_the_configuration_become_flags(options: dict[str, object], flags: tuple[str, ...]) -> None:
    assert engine_flags(options) == flags


def test_a_group_uses_gloo_and_states_rank_size_and_meeting_point() -> None:
    setup = group(group_spec(rank(0), rank(1)))
    assert setup.torch_backend == "gloo"
    assert [env["RANK"] for env in setup.rank_env] == ["0", "1"]
    assert setup.rank_env[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_local_ranks_are_counted_per_node() -> None:
    setup = group(group_spec(rank(0, "a"), rank(1, "b"), rank(2, "b")))
    assert [env["LOCAL_RANK"] for env in setup.rank_env] == ["0", "0", "1"]


def test_a_single_rank_needs_no_preflight() -> None:
    assert group(group_spec(rank(0))).preflight_argv is None
    assert group(group_spec(rank(0), rank(1))).preflight_argv == (
        sys.executable, "-m", "hetero_llm.plugin.preflight",
        "--backend", "gloo", "--device", "cpu", "--deadline-s", "20",
    )  # fmt: skip


def test_an_address_of_another_machine_has_no_interface_here() -> None:
    assert interface_of("192.0.2.77") is None
    assert interface_of("no-such-host.invalid") is None
    assert interface_of("localhost") == "lo"


def facts(**changes: object) -> ModelFacts:
    base = ModelFacts(
        name="toy", source="toy", architecture="Qwen2ForCausalLM", parameters=1, weights_bytes=2, layers=2, heads=4,
        kv_heads=2, head_dim=64, hidden_size=256, vocab_size=512, max_model_len=2048, dtype="bfloat16",
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def test_a_model_the_kernels_have_is_not_refused() -> None:
    assert CpuBackend().check_model(facts(), "xeon-amx", PoolWish()) == ()


@pytest.mark.parametrize(
    ("changes", "rule", "word"),
    [
        ({"head_dim": 16}, "feature", "head size 16"),
        ({"dtype": "float8_e4m3fn"}, "dtype", "float8_e4m3fn"),
        ({"quantization": "bitsandbytes"}, "feature", "bitsandbytes"),
    ],
)
def test_a_model_the_kernels_lack_is_refused_with_rule_and_reason(
    changes: dict[str, object], rule: str, word: str
) -> None:
    (refusal,) = CpuBackend().check_model(facts(**changes), "xeon-amx", PoolWish())
    assert (refusal.rule, refusal.accelerator) == (rule, "xeon-amx")
    assert word in refusal.reason


def test_more_ranks_share_the_servers_memory() -> None:
    assert CpuBackend().overhead_bytes(facts(), 2, 1) < CpuBackend().overhead_bytes(facts(), 1, 1)
