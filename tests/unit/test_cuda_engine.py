"""The command line and environment of engines on NVIDIA devices, the groups of their ranks, and what fits a chip."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hetero_llm_cuda import engine, fit, vllm_entry
from hetero_llm_cuda.group import group
from hetero_llm_cuda.plugin import CudaBackend

from hetero_llm.plugin import Device, EngineSpec, EngineUnfit, GroupSpec, ModelFacts, PoolWish, RankSpec

GIB = 1 << 30
OURS = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def _no_settings_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


def device(index: int, **changes: Any) -> Device:
    return Device(
        **{
            "kind": "cuda",
            "accelerator": "H100-80GB",
            "uid": f"GPU-{index:08x}-0000-4000-8000-000000000000",
            "index": index,
            "memory_bytes": 80 * GIB,
            **changes,
        }
    )


def instance(index: int) -> Device:
    return device(index, uid=f"MIG-{index:08x}-0000-5000-8000-000000000000", accelerator="H100-80GB-MIG-1g.10gb")


def rank(number: int, index: int, node: str = "a", address: str = "127.0.0.1", **changes: Any) -> RankSpec:
    return RankSpec(rank=number, node=node, address=address, device=device(index, **changes))


def group_spec(*ranks: RankSpec, master: str = "127.0.0.1", deadline_s: float = 30.0) -> GroupSpec:
    return GroupSpec(ranks=ranks, tp=len(ranks), pp=1, master_address=master, master_port=29500, deadline_s=deadline_s)


SPEC = EngineSpec(
    model_path="/models/toy",
    served_name="toy",
    devices=(device(4), device(6)),
    tp=2,
    pp=1,
    host="127.0.0.1",
    port=4000,
    max_model_len=2048,
)

FACTS = ModelFacts(
    name="toy", source="toy", architecture="Qwen2ForCausalLM", parameters=1, weights_bytes=2, layers=2, heads=4,
    kv_heads=2, head_dim=64, hidden_size=4096, vocab_size=32000, max_model_len=2048, dtype="bfloat16",
)  # fmt: skip


def flag(argv: tuple[str, ...], name: str) -> str:
    """Return the value argparse would use: that of the last occurrence."""
    return argv[len(argv) - 1 - argv[::-1].index(name) + 1]


# -- Visible devices ---------------------------------------------------------------------------------------------------


def test_cards_go_by_ascending_number_along_the_bus() -> None:
    assert engine.device_env((device(6), device(4), device(10))) == {
        "CUDA_VISIBLE_DEVICES": "4,6,10",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }


def test_instances_go_by_uuid_and_so_does_everything_beside_them() -> None:
    ids = engine.device_env((device(1), instance(0)))["CUDA_VISIBLE_DEVICES"]
    assert ids == f"{instance(0).uid},{device(1).uid}"


def test_under_another_order_of_the_user_cards_go_by_uuid_and_the_order_stays() -> None:
    env = engine.device_env((device(1), device(0)), {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"})
    assert env == {
        "CUDA_VISIBLE_DEVICES": f"{device(0).uid},{device(1).uid}",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
    }


def test_simulated_devices_go_by_number() -> None:
    pretended = device(1, uid="simulated-box-cuda-1", simulated=True)
    assert engine.device_env((pretended,), {"CUDA_DEVICE_ORDER": "x"})["CUDA_VISIBLE_DEVICES"] == "1"


def test_three_engines_on_one_node_see_one_device_each() -> None:
    specs = [dataclasses.replace(SPEC, devices=(device(n),), tp=1) for n in range(3)]
    assert [engine.engine(spec).env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0", "1", "2"]


# -- Command and environment -------------------------------------------------------------------------------------------


def test_the_engine_is_vllm_behind_the_check_of_its_devices() -> None:
    launch = engine.engine(SPEC)
    assert launch.argv[:5] == (sys.executable, "-m", "hetero_llm_cuda.vllm_entry", "serve", "/models/toy")
    assert launch.env["HETERO_LLM_CUDA_EXPECTED"] == f"{device(4).uid},{device(6).uid}"


def test_the_executor_the_sizes_and_the_share_of_memory_are_always_stated() -> None:
    argv = engine.engine(SPEC).argv
    assert flag(argv, "--distributed-executor-backend") == "mp"
    assert (flag(argv, "--tensor-parallel-size"), flag(argv, "--pipeline-parallel-size")) == ("2", "1")
    assert flag(argv, "--gpu-memory-utilization") == "0.9"
    assert (flag(argv, "--max-model-len"), flag(argv, "--dtype")) == ("2048", "auto")


def test_a_size_of_the_kv_cache_is_passed_on_only_when_it_was_asked_for() -> None:
    assert "--kv-cache-memory-bytes" not in engine.engine(SPEC).argv
    sized = dataclasses.replace(SPEC, kv_cache_bytes=GIB)
    assert flag(engine.engine(sized).argv, "--kv-cache-memory-bytes") == str(GIB)


def test_flags_of_the_user_come_last_and_win() -> None:
    spec = dataclasses.replace(SPEC, extra_args=("--max-model-len", "512"), options={"max_model_len": 1024})
    argv = engine.engine(spec).argv
    assert argv[-4:] == ("--max-model-len", "1024", "--max-model-len", "512")


def test_variables_of_other_vendors_and_launchers_are_removed() -> None:
    removed = engine.engine(SPEC).env_remove
    assert {"ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "RANK", "MASTER_ADDR", "RANK_TABLE_FILE"} <= set(
        removed
    )
    assert "CUDA_VISIBLE_DEVICES" not in removed


def test_ranks_on_one_node_meet_on_loopback() -> None:
    env = engine.engine(SPEC).env
    assert (env["VLLM_HOST_IP"], env["NCCL_SOCKET_IFNAME"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "=lo", "lo")


def test_what_the_user_set_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    env = engine.engine(SPEC).env
    assert (env["NCCL_SOCKET_IFNAME"], env["NCCL_DEBUG"], env["GLOO_SOCKET_IFNAME"]) == ("ib0,ib1", "INFO", "lo")


def test_the_second_node_of_a_group_is_headless_and_sees_only_its_own_devices() -> None:
    devices = (device(0), device(1), device(2), device(3))
    spec = dataclasses.replace(
        SPEC, devices=devices, tp=2, pp=2, node_count=2, node_rank=1, master_address="127.0.0.1", master_port=5000
    )
    launch = engine.engine(spec)
    assert launch.headless
    assert "--headless" in launch.argv
    assert (flag(launch.argv, "--nnodes"), flag(launch.argv, "--node-rank")) == ("2", "1")
    assert (flag(launch.argv, "--master-addr"), flag(launch.argv, "--master-port")) == ("127.0.0.1", "5000")
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert launch.env["HETERO_LLM_CUDA_EXPECTED"] == f"{device(2).uid},{device(3).uid}"


def test_simulated_devices_are_not_looked_for() -> None:
    pretended = (device(0, uid="simulated-box-cuda-0", simulated=True),)
    assert "HETERO_LLM_CUDA_EXPECTED" not in engine.engine(dataclasses.replace(SPEC, devices=pretended, tp=1)).env


# -- Groups ------------------------------------------------------------------------------------------------------------


def test_ranks_get_numbers_master_devices_and_interface() -> None:
    setup = group(group_spec(rank(0, 2), rank(1, 5)))
    assert setup.torch_backend == "nccl"
    assert setup.rank_env[1] == {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "2,5",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_NCCL_BLOCKING_WAIT": "1",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30",
    }


def test_each_node_counts_its_own_ranks_and_shows_them_its_own_devices() -> None:
    setup = group(group_spec(rank(0, 7, "a"), rank(1, 0, "b"), rank(2, 1, "b")))
    assert [env["LOCAL_RANK"] for env in setup.rank_env] == ["0", "0", "1"]
    assert [env["CUDA_VISIBLE_DEVICES"] for env in setup.rank_env] == ["7", "0,1", "0,1"]


def test_over_nodes_the_interface_is_that_of_the_ranks_own_address() -> None:
    spec = group_spec(rank(0, 0, "a", "127.0.0.1"), rank(1, 0, "b", "192.0.2.7"), master="192.0.2.1")
    here, elsewhere = group(spec).rank_env
    assert here["NCCL_SOCKET_IFNAME"] == "=lo"
    assert "NCCL_SOCKET_IFNAME" not in elsewhere


def test_the_preflight_is_over_nccl_with_the_groups_deadline() -> None:
    argv = group(group_spec(rank(0, 0), rank(1, 1), deadline_s=12.5)).preflight_argv
    assert argv is not None
    assert argv[:3] == (sys.executable, "-m", "hetero_llm.plugin.preflight")
    assert argv[3:] == ("--backend", "nccl", "--device", "cuda", "--deadline-s", "12.5")


def test_a_single_rank_needs_no_preflight() -> None:
    assert group(group_spec(rank(0, 0))).preflight_argv is None


def test_instances_form_no_group() -> None:
    with pytest.raises(EngineUnfit, match=r"MIG instances \(H100-80GB-MIG-1g.10gb\) cannot form a group"):
        group(group_spec(*(RankSpec(rank=n, node="a", address="127.0.0.1", device=instance(n)) for n in (0, 1))))
    assert group(group_spec(RankSpec(rank=0, node="a", address="127.0.0.1", device=instance(0)))).preflight_argv is None


# -- The entry: libcuda is the boundary --------------------------------------------------------------------------------


class Driver:
    """The functions of libcuda.so.1 that the entry uses."""

    def __init__(self, *uuids: str, init: int = 0, second: bool = True) -> None:
        self._raw = [bytes.fromhex(text.replace("-", "")) for text in uuids]
        self._init = init
        if second:
            self.cuDeviceGetUuid_v2 = self.cuDeviceGetUuid

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._init

    def cuDeviceGetCount(self, reference: Any) -> int:  # noqa: N802
        reference._obj.value = len(self._raw)
        return 0

    def cuDeviceGet(self, reference: Any, number: int) -> int:  # noqa: N802
        reference._obj.value = number
        return 0

    def cuDeviceGetUuid(self, reference: Any, device: Any) -> int:  # noqa: N802
        ctypes.memmove(reference, self._raw[device.value], 16)
        return 0


A, B = "00000000-0000-4000-8000-00000000000a", "00000000-0000-4000-8000-00000000000b"


@pytest.mark.parametrize("second", [True, False])
def test_uuids_are_read_in_cudas_order(second: bool) -> None:
    assert vllm_entry.visible_uuids(Driver(B, A, second=second)) == [B, A]


def test_the_devices_that_were_meant_pass() -> None:
    vllm_entry.check([f"GPU-{A}", f"GPU-{B}"], [A, B])
    vllm_entry.check([f"MIG-{A.upper()}"], [A])


@pytest.mark.parametrize("seen", [[B, A], [A], [A, B, B], []])
def test_other_devices_or_another_order_are_refused(seen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(vllm_entry.DevicesUnusable, match=f"meant were GPU-{A}.*CUDA_VISIBLE_DEVICES=0,1 CUDA shows"):
        vllm_entry.check([f"GPU-{A}", f"GPU-{B}"], seen)


def test_instances_named_in_the_old_way_are_not_compared() -> None:
    vllm_entry.check([f"MIG-GPU-{A}/1/0"], [B])


@pytest.mark.parametrize(
    ("status", "words"), [(802, "fabricmanager"), (803, "different versions"), (100, "no device"), (999, "driver API")]
)
def test_a_driver_that_does_not_start_is_put_in_words(status: int, words: str) -> None:
    with pytest.raises(vllm_entry.DevicesUnusable, match=f"cuInit failed with {status}: .*{words}"):
        vllm_entry.visible_uuids(Driver(A, init=status))


def entered(monkeypatch: pytest.MonkeyPatch, expected: str | None) -> tuple[list[list[str]], dict[str, str]]:
    """Run the entry up to the point where it would become vLLM; return what with, and the environment then."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: became.append([program, *argv[1:]]))
    if expected is not None:
        monkeypatch.setenv("HETERO_LLM_CUDA_EXPECTED", expected)
    vllm_entry.main(["serve", "/models/toy"])
    return became, dict(os.environ)


def test_the_entry_becomes_vllm_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_entry, "LIBRARY", "libno-such-cuda.so.1")
    became, _ = entered(monkeypatch, None)
    assert became == [[sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/models/toy"]]


def test_the_entry_refuses_before_vllm_loads_when_there_is_no_driver(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm_entry, "LIBRARY", "libno-such-cuda.so.1")
    with pytest.raises(SystemExit) as ended:
        entered(monkeypatch, f"GPU-{A}")
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("DevicesUnusable: libno-such-cuda.so.1 cannot be loaded: ")
    assert "HETERO_LLM_CUDA_EXPECTED" not in os.environ


# -- What fits a chip --------------------------------------------------------------------------------------------------


def refusals(accelerator: str, wish: PoolWish | None = None, **changes: Any) -> list[tuple[str, str]]:
    found = CudaBackend().check_model(dataclasses.replace(FACTS, **changes), accelerator, wish or PoolWish())
    assert all((r.node, r.kind, r.accelerator) == ("", "cuda", accelerator) for r in found)
    return [(r.rule, r.reason) for r in found]


@pytest.mark.parametrize("accelerator", ["A100-40GB", "H100-80GB", "L4", "B200", "unknown", "Brand-New-9000"])
def test_bfloat16_runs_from_ampere_on_and_on_unknown_chips(accelerator: str) -> None:
    assert refusals(accelerator) == []


def test_bfloat16_is_refused_below_ampere_with_both_numbers() -> None:
    assert refusals("T4") == [("dtype", "T4 has compute capability 7.5; bfloat16 needs 8.0")]
    assert refusals("T4", dtype="float16") == []


def test_float8_weights_need_ada() -> None:
    ((rule, reason),) = refusals("A100-80GB", dtype="float8_e4m3fn")
    assert (rule, reason) == ("dtype", "A100-80GB has compute capability 8.0; float8_e4m3fn needs 8.9")
    assert refusals("L40S", dtype="float8_e4m3fn") == []


@pytest.mark.parametrize(
    ("quantization", "refused", "accepted"),
    [("awq", "V100-16GB", "T4"), ("fp8", "V100-16GB", "A100-40GB"), ("mxfp4", "T4", "A100-40GB"),
     ("fp_quant", "H100-80GB", "B200"), ("moe_wna16", None, "V100-16GB"), ("compressed-tensors", None, "V100-16GB")],
)  # fmt: skip
def test_quantisation_needs_the_capability_its_kernels_have(
    quantization: str, refused: str | None, accepted: str
) -> None:
    assert refusals(accepted, dtype="float16", quantization=quantization) == []
    if refused:
        ((rule, reason),) = refusals(refused, dtype="float16", quantization=quantization)
        assert rule == "dtype"
        assert f"quantisation {quantization} needs" in reason


def test_chips_older_than_vllms_least_are_refused_once() -> None:
    assert [rule for rule, _ in refusals("P40")] == ["feature"]


@pytest.mark.parametrize("wish", [PoolWish(tp=2), PoolWish(pp=2)])
def test_more_than_one_rank_on_instances_is_refused(wish: PoolWish) -> None:
    ((rule, reason),) = refusals("H100-80GB-MIG-1g.10gb", wish)
    assert rule == "feature"
    assert reason.startswith("2 ranks; MIG")
    assert refusals("H100-80GB-MIG-1g.10gb", PoolWish(tp=None)) == []


def test_the_overhead_counts_the_context_and_for_groups_nccl() -> None:
    alone, pair = fit.overhead_bytes(FACTS, 1, 1), fit.overhead_bytes(FACTS, 1, 2)
    assert pair - alone == fit.NCCL_BYTES
    assert fit.CONTEXT_BYTES + fit.GRAPH_BYTES < alone < 4 * GIB


def test_the_overhead_shrinks_with_the_layers_width_and_grows_with_the_vocabulary() -> None:
    wide = dataclasses.replace(FACTS, intermediate_size=28_672)
    assert fit.overhead_bytes(wide, 4, 1) < fit.overhead_bytes(wide, 2, 1)
    many = dataclasses.replace(FACTS, vocab_size=152_064)
    assert fit.overhead_bytes(many, 1, 1) - fit.overhead_bytes(FACTS, 1, 1) == (152_064 - 32_000) * 256 * 4


def test_a_local_folder_needs_no_hub(tmp_path: Path) -> None:
    assert engine.engine(dataclasses.replace(SPEC, model_path=str(tmp_path))).env["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine.engine(SPEC).env
