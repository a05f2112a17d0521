"""The command and the environment of an Ascend engine, and which models a part takes."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hetero_llm_ascend import versions, visible
from hetero_llm_ascend.plugin import AscendBackend

from hetero_llm.plugin import Device, EngineLaunch, EngineSpec, EngineUnfit, ModelFacts, PoolWish


def device(index: int, accelerator: str = "910B2", **more: Any) -> Device:
    return Device(kind="ascend", accelerator=accelerator, uid=f"npu-{index}", index=index, **more)


def launch(*devices: Device, **changes: Any) -> EngineLaunch:
    held = devices or (device(4), device(6))
    values: dict[str, Any] = {
        "model_path": "/models/m",
        "served_name": "m",
        "devices": held,
        "tp": len(held),
        "pp": 1,
        "host": "127.0.0.1",
        "port": 8100,
        "max_model_len": 4096,
    }
    return AscendBackend().engine(EngineSpec(**(values | changes)))


def flag(argv: tuple[str, ...], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv else None


def install(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


ASCEND_ENTRY_POINTS = """\
[vllm.platform_plugins]
ascend = vllm_ascend:register
[vllm.general_plugins]
ascend_kv_connector = vllm_ascend:register_connector
ascend_model = vllm_ascend:register_model
"""


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_engine_is_vllms_own_command_with_the_model_behind_serve() -> None:
    argv = launch().argv
    assert argv[:5] == (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/models/m")


def test_address_name_sizes_and_executor_are_passed() -> None:
    argv = launch().argv
    assert (flag(argv, "--host"), flag(argv, "--port"), flag(argv, "--served-model-name")) == ("127.0.0.1", "8100", "m")
    assert (flag(argv, "--tensor-parallel-size"), flag(argv, "--pipeline-parallel-size")) == ("2", "1")
    assert flag(argv, "--distributed-executor-backend") == "mp"
    assert flag(argv, "--max-model-len") == "4096"


def test_the_block_size_is_the_one_the_planner_counts_in() -> None:
    assert flag(launch().argv, "--block-size") == str(AscendBackend.kv_block_tokens) == "128"


def test_the_kv_cache_is_given_only_when_it_was_planned() -> None:
    assert flag(launch().argv, "--kv-cache-memory-bytes") is None
    argv = launch(kv_cache_bytes=1 << 30, gpu_memory_utilization=0.85).argv
    assert flag(argv, "--kv-cache-memory-bytes") == str(1 << 30)
    assert flag(argv, "--gpu-memory-utilization") == "0.85"


def test_a_310p_computes_in_float16_without_graphs() -> None:
    argv = launch(device(0, "310P3"), dtype="bfloat16").argv
    assert flag(argv, "--dtype") == "float16"
    assert "--enforce-eager" in argv


def test_a_910b_keeps_its_dtype_and_graphs() -> None:
    argv = launch(dtype="bfloat16").argv
    assert flag(argv, "--dtype") == "bfloat16"
    assert "--enforce-eager" not in argv


def test_weights_of_the_vendors_quantiser_are_announced_and_served_in_bfloat16(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_model_description.json").write_text("{}")
    argv = launch(model_path=str(tmp_path)).argv
    assert (flag(argv, "--quantization"), flag(argv, "--dtype")) == ("ascend", "bfloat16")


def test_weights_of_the_vendors_quantiser_stay_in_float16_on_a_310p(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "quant_model_description.json").write_text("{}")
    argv = launch(device(0, "310P3"), model_path=str(tmp_path)).argv
    assert (flag(argv, "--quantization"), flag(argv, "--dtype")) == ("ascend", "float16")


@pytest.mark.parametrize(
    "config", ["{}", '{"quantization_config": {"quant_method": "compressed-tensors"}}', "not json"]
)
def test_other_weights_are_left_to_vllm(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    argv = launch(model_path=str(tmp_path)).argv
    assert flag(argv, "--quantization") is None
    assert flag(argv, "--dtype") == "auto"


def test_additional_config_is_passed_as_json_and_the_users_flags_come_last() -> None:
    options = {"additional_config": {"ascend_scheduler_config": {"enabled": True}}, "max_num_seqs": 8}
    argv = launch(options=options, extra_args=("--seed", "7")).argv
    assert json.loads(str(flag(argv, "--additional-config"))) == options["additional_config"]
    assert flag(argv, "--max-num-seqs") == "8"
    assert argv[-2:] == ("--seed", "7")


def test_a_node_behind_the_first_serves_no_http_and_joins_it() -> None:
    held = tuple(device(index) for index in range(4))
    started = launch(*held, node_count=2, node_rank=1, master_address="127.0.0.1", master_port=29500)
    assert started.headless
    assert "--headless" in started.argv
    assert (flag(started.argv, "--nnodes"), flag(started.argv, "--node-rank")) == ("2", "1")
    assert started.env["ASCEND_RT_VISIBLE_DEVICES"] == "2,3"


# -- the environment ---------------------------------------------------------------------------------------------------


def test_visible_devices_are_ascending_without_blanks_whatever_order_ray_gave() -> None:
    env = launch(device(6), device(4), device(10)).env
    assert env["ASCEND_RT_VISIBLE_DEVICES"] == "4,6,10"


def test_ids_are_strings_end_to_end() -> None:
    env = launch().env
    assert all(isinstance(value, str) for value in env.values())
    assert AscendBackend().device_env((device(1), device(0))) == {"ASCEND_RT_VISIBLE_DEVICES": "0,1"}


def test_two_replicas_on_a_host_see_disjoint_devices_and_port_windows() -> None:
    one, other = launch(device(0), device(1)).env, launch(device(2), device(3)).env
    assert (one["ASCEND_RT_VISIBLE_DEVICES"], other["ASCEND_RT_VISIBLE_DEVICES"]) == ("0,1", "2,3")
    assert abs(int(one["HCCL_IF_BASE_PORT"]) - int(other["HCCL_IF_BASE_PORT"])) >= 32


def test_other_vendors_variables_and_left_overs_do_not_reach_the_engine() -> None:
    started = launch()
    assert {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "RANK_TABLE_FILE", "RANK", "VLLM_VERSION"} <= set(
        started.env_remove
    )
    assert not set(started.env_remove) & set(started.env)
    assert "CUDA_VISIBLE_DEVICES" in AscendBackend.other_visible_envs


def test_ranks_of_one_node_meet_on_loopback() -> None:
    env = launch().env
    assert env["HCCL_IF_IP"] == env["VLLM_HOST_IP"] == "127.0.0.1"
    assert env["HCCL_SOCKET_IFNAME"] == env["GLOO_SOCKET_IFNAME"] == "lo"


def test_workers_are_spawned() -> None:
    assert launch().env["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"


def test_the_platform_plugin_is_named_even_where_no_entry_point_says_so() -> None:
    assert launch().env["VLLM_PLUGINS"].split(",")[0] == "ascend"


def test_every_general_plugin_is_named_and_another_vendors_platform_is_not(site: Path) -> None:
    install(site, "vllm-ascend", "0.23.0", ASCEND_ENTRY_POINTS)
    other = "[vllm.platform_plugins]\nacme = vllm_acme:register\n[vllm.general_plugins]\nzeta = other:plug\n"
    install(site, "vllm-acme", "1.0", other)
    named = launch().env["VLLM_PLUGINS"].split(",")
    assert named[0] == "ascend"
    assert {"ascend_kv_connector", "ascend_model", "zeta"} <= set(named)
    assert "acme" not in named
    # The variable filters all general plugins, so those of whatever else is installed here must be there too.
    assert set(named[1:]) == {entry.name for entry in metadata.entry_points(group="vllm.general_plugins")}


# -- versions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plugin", "engine", "fits"),
    [
        ("0.23.0", "0.23.0+empty", True),
        ("0.23.0.post1", "0.23.0", True),
        ("0.23.0rc1", "0.23.0", True),
        ("0.23.0", "0.22.0", False),
        ("0.23.0", "0.23.1", False),
        ("0.18.0rc1", "0.23.0", False),
    ],
)
def test_the_plugin_needs_exactly_its_own_vllm(site: Path, plugin: str, engine: str, fits: bool) -> None:
    install(site, "vllm-ascend", plugin, ASCEND_ENTRY_POINTS)
    install(site, "vllm", engine)
    if fits:
        assert launch().argv
        return
    with pytest.raises(EngineUnfit) as refused:
        launch()
    assert f"vllm-ascend {plugin} needs vLLM" in refused.value.report.message
    assert f"installed is vLLM {engine}" in refused.value.report.message
    assert refused.value.report.next


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.23.0", "0.23.0"), ("v0.23.0+empty", "0.23.0"), ("0.23rc1", "0.23.0"), ("2.10.0.post4", "2.10.0"), ("x", "x")],
)
def test_a_release_is_the_first_three_numbers_of_a_version(version: str, release: str) -> None:
    assert versions.release(version) == release


def test_torch_npu_needs_exactly_its_own_torch(site: Path) -> None:
    install(site, "torch-npu", "2.10.0.post4")
    install(site, "torch", "2.13.0+cpu")
    with pytest.raises(EngineUnfit) as refused:
        launch()
    assert refused.value.report.message == "torch-npu 2.10.0.post4 needs torch 2.10.0, installed is torch 2.13.0+cpu"


def test_a_pretended_device_is_launched_for_its_stand_in_whatever_is_installed(site: Path) -> None:
    install(site, "vllm-ascend", "0.23.0")
    install(site, "vllm", "0.32.0")
    assert launch(device(0, simulated=True, stand_in="sim")).argv


def test_versions_are_read_without_importing_anything(site: Path, tmp_path: Path) -> None:
    install(site, "vllm-ascend", "0.23.0")
    install(site, "vllm", "0.23.0+empty")
    install(site, "torch-npu", "2.10.0")
    home = tmp_path / "cann"
    (home / "runtime").mkdir(parents=True)
    (home / "runtime/version.info").write_text("Version=9.0.1\n")
    driver = tmp_path / "usr/local/Ascend/driver"
    driver.mkdir(parents=True)
    (driver / "version.info").write_text("Version=25.5.1\nascendhal_version=7.35.23\n")
    found = versions.versions(tmp_path, {"ASCEND_HOME_PATH": str(home)})
    assert found | {"torch": None} == {
        "driver": "25.5.1",
        "toolkit": "9.0.1",
        "torch": None,
        "torch-npu": "2.10.0",
        "vllm": "0.23.0+empty",
        "plugin": "0.23.0",
    }


def test_the_toolkit_is_found_in_its_usual_place_without_its_environment(tmp_path: Path) -> None:
    home = tmp_path / "usr/local/Ascend/ascend-toolkit/latest"
    home.mkdir(parents=True)
    (home / "version.cfg").write_text("# version: 1.0\nruntime_running_version=[8.5.0:8.5.0]\n")
    assert versions.toolkit_version(tmp_path, {}) == "8.5.0"
    assert versions.toolkit_home(tmp_path, {"ASCEND_HOME_PATH": str(tmp_path / "gone")}) == home


def test_what_is_not_installed_has_no_version(tmp_path: Path) -> None:
    found = versions.versions(tmp_path, {})
    assert (found["driver"], found["toolkit"]) == (None, None)


def test_entry_points_are_read_and_not_loaded(site: Path) -> None:
    install(site, "vllm-ascend", "0.23.0", ASCEND_ENTRY_POINTS)
    assert {"ascend", "ascend_kv_connector", "ascend_model"} <= set(versions.plugin_names())
    assert "vllm_ascend" not in sys.modules
    assert [entry.name for entry in metadata.entry_points(group="vllm.platform_plugins")] == ["ascend"]


# -- the visible-devices variable --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "0,1", "0,2,10", "", "NoDevFiles"])
def test_a_well_written_value_has_no_complaint(text: str) -> None:
    assert visible.complaint(text) is None


@pytest.mark.parametrize("text", ["6,4", "1,1", "0, 1", "0-3", ",0", "0,1,", "a", " 0"])
def test_a_value_that_shows_fewer_devices_than_it_names_is_complained_about(text: str) -> None:
    assert text in str(visible.complaint(text))


# -- models ------------------------------------------------------------------------------------------------------------


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "name": "m",
        "source": "m",
        "architecture": "Qwen2ForCausalLM",
        "parameters": 1,
        "weights_bytes": 2,
        "layers": 2,
        "heads": 28,
        "kv_heads": 4,
        "head_dim": 128,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_model_len": 32768,
        "dtype": "bfloat16",
    }
    return ModelFacts(**(values | changes))


def rules(accelerator: str, pp: int | None = 1, **changes: Any) -> list[str]:
    rejected = AscendBackend().check_model(facts(**changes), accelerator, PoolWish(pp=pp))
    assert all(r.node == "" and r.kind == "ascend" and r.accelerator == accelerator for r in rejected)
    return [rejection.rule for rejection in rejected]


@pytest.mark.parametrize("accelerator", ["910B1", "910B4-1", "910_9391", "310P3", "950PR", "910", "unknown"])
def test_an_ordinary_model_runs_on_every_supported_part(accelerator: str) -> None:
    assert rules(accelerator) == []


@pytest.mark.parametrize("accelerator", ["910A", "910B", "910ProA", "910ProB", "910PremiumA"])
def test_the_first_910_is_not_supported(accelerator: str) -> None:
    (rejection,) = AscendBackend().check_model(facts(), accelerator, PoolWish())
    assert (rejection.rule, accelerator in rejection.reason) == ("feature", True)


def test_a_310p_takes_no_pipelines() -> None:
    assert rules("310P3", pp=2) == ["feature"]
    assert rules("310P3", pp=None) == []
    assert rules("910B2", pp=2) == []


def test_w8a8_with_float16_is_refused_except_where_there_is_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "quant_model_description.json").write_text("{}")
    assert rules("910B2", dtype="float16", path=str(tmp_path)) == ["dtype"]
    assert rules("910B2", dtype="bfloat16", path=str(tmp_path)) == []
    assert rules("310P3", dtype="float16", path=str(tmp_path)) == []


@pytest.mark.parametrize("quantization", ["awq", "gptq", "gguf", "bitsandbytes", "fp8"])
def test_quantisations_without_kernels_are_refused(quantization: str) -> None:
    assert rules("910B2", quantization=quantization) == ["feature"]


def test_fp8_needs_a_950() -> None:
    assert rules("950PR", quantization="fp8", dtype="float8_e4m3fn") == []
    assert rules("910B2", dtype="float8_e4m3fn") == ["dtype"]


def test_compressed_tensors_run_except_on_a_310p() -> None:
    assert rules("910B2", quantization="compressed-tensors") == []
    assert rules("310P3", quantization="compressed-tensors") == ["feature"]


def test_a_group_needs_more_beside_weights_and_cache_than_one_device() -> None:
    backend = AscendBackend()
    alone, split = backend.overhead_bytes(facts(), 1, 1), backend.overhead_bytes(facts(), 4, 1)
    wide = backend.overhead_bytes(facts(intermediate_size=4 * 18944), 1, 1)
    assert 1 << 30 < alone < 8 << 30
    assert split != alone
    assert wide > alone
