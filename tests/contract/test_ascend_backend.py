"""What the Ascend backend relies on, checked against the real vllm-ascend, torch-npu and Ray.

Neither wheel can be imported here (they need CANN and an NPU), so their files are read: constants by their syntax tree,
pure functions by running them out of it. The wheels are downloaded without their dependencies, once per session.
"""

from __future__ import annotations

import ast
import ctypes
import os
import re
import subprocess
import sys
import textwrap
import warnings
import zipfile
from collections.abc import Callable, Iterable
from enum import Enum
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ascend import FakeChip, Machine, build_dcmi
from hetero_llm_ascend import log, models, versions, visible
from hetero_llm_ascend.chip import accelerator_name
from hetero_llm_ascend.plugin import AscendBackend

from hetero_llm.inventory.probe import probe_kinds
from hetero_llm.matrix import load_matrix
from hetero_llm.plugin import API_VERSION, Device
from hetero_llm.plugin.rootcause import find_root_cause
from hetero_llm.plugin.software import platform_plugins

VLLM_ASCEND, TORCH_NPU = "0.23.0", "2.10.0"
DOWNLOAD_DEADLINE_S = 240
PACKAGE = Path(__file__).parents[2] / "backends" / "ascend" / "hetero_llm_ascend"


def device(index: int) -> Device:
    return Device(kind="ascend", accelerator="910B2", uid=f"npu-{index}", index=index)


# -- what can be said without the wheels -------------------------------------------------------------------------------


def test_the_class_attributes_are_in_the_documented_shape() -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*", AscendBackend.kind)
    assert AscendBackend.api_version == API_VERSION
    assert AscendBackend.visible_devices_env not in AscendBackend.other_visible_envs


def test_importing_the_plugin_discovering_and_asking_for_versions_loads_no_vendor_library() -> None:
    code = (
        "import sys; from hetero_llm_ascend.plugin import AscendBackend; b = AscendBackend(); b.discover();"
        "b.versions(); b.doctor();"
        "print(sorted({'acl', 'torch', 'torch_npu', 'vllm', 'vllm_ascend', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_no_file_of_the_backend_imports_vllm_ascend() -> None:
    for path in PACKAGE.glob("*.py"):
        imported = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(path.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert not imported & {"vllm_ascend", "vllm", "torch", "torch_npu", "acl"}, path.name


def test_the_core_reads_eight_devices_through_its_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = build_dcmi(tmp_path)
    if library is None:
        pytest.skip("there is no C compiler to build the fake driver library with")
    machine = Machine(tmp_path / "machine")
    machine.dcmi(library, [FakeChip(card=n, logical=n, physical=n, die=0xA0 + 8 * n) for n in range(8)])
    for name, value in machine.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    found = probe_kinds(["ascend"])["ascend"].discovery
    assert found.source == "dcmi"
    assert [device.index for device in found.devices] == list(range(8))


# -- Ray ---------------------------------------------------------------------------------------------------------------


def test_rays_own_manager_uses_the_resource_and_the_variable_of_this_backend() -> None:
    from ray._private.accelerators.npu import NPUAcceleratorManager

    assert NPUAcceleratorManager.get_resource_name() == AscendBackend.native_resource
    assert NPUAcceleratorManager.get_visible_accelerator_ids_env_var() == AscendBackend.visible_devices_env


def test_ray_writes_ids_as_it_has_them_so_they_must_be_sorted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private.accelerators.npu import NPUAcceleratorManager

    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "unset")
    monkeypatch.delenv("RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES", raising=False)
    NPUAcceleratorManager.set_current_process_visible_accelerator_ids(["6", "4"])
    assert os.environ["ASCEND_RT_VISIBLE_DEVICES"] == "6,4"
    assert NPUAcceleratorManager.get_current_process_visible_accelerator_ids() == ["6", "4"]
    assert AscendBackend().device_env((device(6), device(4))) == {"ASCEND_RT_VISIBLE_DEVICES": "4,6"}


# -- the wheels --------------------------------------------------------------------------------------------------------


def download(folder: Path, requirement: str) -> Path:
    """Return the unpacked wheel of `requirement`; skips the tests that want it when the index is out of reach."""
    platforms = [word for glibc in ("2_28", "2_34") for word in ("--platform", f"manylinux_{glibc}_x86_64")]
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--python-version", "3.11"]
    argv += [*platforms, "--retries", "1", "--timeout", "20", "-q", "-d", str(folder), requirement]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirement} was not downloaded within {DOWNLOAD_DEADLINE_S} s")
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"{requirement} cannot be had from the package index: {said[-1] if said else 'no answer'}")
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(unpacked)
    return unpacked


@pytest.fixture(scope="session")
def vllm_ascend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("vllm-ascend"), f"vllm-ascend=={VLLM_ASCEND}")


@pytest.fixture(scope="session")
def torch_npu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download(tmp_path_factory.mktemp("torch-npu"), f"torch-npu=={TORCH_NPU}")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def constant(path: Path, name: str, inside: str | None = None) -> Any:
    """Return the literal assigned to `name` at the top of a file, or in a class of it."""
    module = tree(path)
    body: Iterable[ast.stmt] = module.body
    if inside is not None:
        (owner,) = (node for node in module.body if isinstance(node, ast.ClassDef) and node.name == inside)
        body = owner.body
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            return ast.literal_eval(node.value)  # type: ignore[attr-defined]
    raise AssertionError(f"{path.name} assigns no {name}")


def functions(path: Path, names: Iterable[str], **world: Any) -> dict[str, Any]:
    """Return functions of a file, run out of its syntax tree in a world of their own."""
    wanted = set(names)
    nodes = [node for node in tree(path).body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    assert {node.name for node in nodes} == wanted, path.name
    for node in nodes:
        node.decorator_list = []
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = dict(world)
    exec(compile(ast.Module(body=[*future, *nodes], type_ignores=[]), str(path), "exec"), space)
    return space


# -- vllm-ascend -------------------------------------------------------------------------------------------------------


def test_vllm_ascend_names_the_same_resource_variable_and_device_type(vllm_ascend: Path) -> None:
    platform = vllm_ascend / "vllm_ascend/platform.py"
    assert constant(platform, "ray_device_key", "NPUPlatform") == AscendBackend.native_resource
    assert constant(platform, "device_control_env_var", "NPUPlatform") == AscendBackend.visible_devices_env
    assert constant(platform, "device_type", "NPUPlatform") == "npu"


def test_all_entry_points_of_vllm_ascend_are_in_the_plugins_variable(
    vllm_ascend: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(vllm_ascend))
    entry_points = [
        entry for entry in metadata.distribution("vllm-ascend").entry_points if entry.group.startswith("vllm.")
    ]
    assert {entry.group for entry in entry_points} == {"vllm.platform_plugins", "vllm.general_plugins"}
    assert [entry.value for entry in platform_plugins()] == ["vllm_ascend:register"]
    assert {entry.name for entry in entry_points} <= set(versions.plugin_names())
    assert "vllm_ascend" not in sys.modules


def test_vllm_ascend_pins_a_torch_that_passes_our_version_lock(vllm_ascend: Path) -> None:
    (info,) = vllm_ascend.glob("*.dist-info")
    required = dict(re.findall(r"^Requires-Dist: (torch|torch-npu)==(\S+)$", (info / "METADATA").read_text(), re.M))
    assert versions.torch_mismatch(required.get) is None
    assert versions.release(required["torch"]) == TORCH_NPU
    assert versions.release((metadata.Distribution.at(info)).version) == VLLM_ASCEND


def test_vllm_ascend_compares_vllms_version_as_a_whole(vllm_ascend: Path) -> None:
    from packaging.version import InvalidVersion, Version

    world = {"Version": Version, "InvalidVersion": InvalidVersion, "functools": SimpleNamespace(cache=lambda f: f)}
    envs = SimpleNamespace(VLLM_VERSION="0.23.1")
    is_version = functions(vllm_ascend / "vllm_ascend/utils.py", ["vllm_version_is"], envs_ascend=envs, **world)
    assert not is_version["vllm_version_is"](VLLM_ASCEND)
    envs.VLLM_VERSION = VLLM_ASCEND
    assert is_version["vllm_version_is"](VLLM_ASCEND)


def test_the_block_size_this_backend_sets_is_the_one_vllm_ascend_keeps(vllm_ascend: Path) -> None:
    nothing = SimpleNamespace(xlite_graph_config=SimpleNamespace(enabled=False))
    logger = SimpleNamespace(info=lambda *_: None, warning=lambda *_: None)
    refresh: Callable[[Any], None] = functions(
        vllm_ascend / "vllm_ascend/utils.py", ["refresh_block_size"], get_ascend_config=lambda: nothing, logger=logger
    )["refresh_block_size"]
    for asked in (None, 16, AscendBackend.kv_block_tokens):
        config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=asked, enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2"), is_hybrid=False),
        )
        refresh(config)
        assert config.cache_config.block_size == AscendBackend.kv_block_tokens


class _Part(Enum):
    A2, A3, _310P, A5 = range(4)


def detector(vllm_ascend: Path, part: _Part) -> Callable[[str], str | None]:
    """Return vllm-ascend's own detection of a folder's quantisation, on a part."""
    package = vllm_ascend / "vllm_ascend"
    filename = constant(package / "quantization/modelslim_config.py", "MODELSLIM_CONFIG_FILENAME")
    code = textwrap.dedent(
        ast.unparse(
            next(
                node
                for node in tree(package / "quantization/utils.py").body
                if isinstance(node, ast.FunctionDef) and node.name == "detect_quantization_method"
            )
        )
    )
    # Its one import would load torch_npu; the constant it takes from there is read above.
    code = re.sub(r"^\s+from vllm_ascend\S* import .*$", "", code, flags=re.M)

    def get_model_file(folder: str, name: str, revision: str | None = None) -> Path | None:
        return path if (path := Path(folder, name)).is_file() else None

    import json

    space: dict[str, Any] = {
        "json": json,
        "get_model_file": get_model_file,
        "MODELSLIM_CONFIG_FILENAME": filename,
        "get_ascend_device_type": lambda: part,
        "AscendDeviceType": _Part,
        **{
            name: constant(package / "utils.py", name)
            for name in ("ASCEND_QUANTIZATION_METHOD", "COMPRESSED_TENSORS_METHOD", "FP8_METHOD")
        },
    }
    exec(compile(code, "detect_quantization_method", "exec"), space)
    return space["detect_quantization_method"]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("files", "config"),
    [
        (["quant_model_description.json"], "{}"),
        ([], '{"quantization_config": {"quant_method": "compressed-tensors"}}'),
        ([], "{}"),
    ],
)
def test_a_folders_quantisation_is_recognised_as_vllm_ascend_does(
    vllm_ascend: Path, tmp_path: Path, files: list[str], config: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    for name in files:
        (tmp_path / name).write_text("{}")
    assert models.quantization_in(str(tmp_path)) == detector(vllm_ascend, _Part.A2)(str(tmp_path))


def test_vllm_ascend_serves_fp8_on_the_950_only_as_the_model_check_says(vllm_ascend: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert detector(vllm_ascend, _Part.A5)(str(tmp_path)) == "fp8"
    assert detector(vllm_ascend, _Part.A2)(str(tmp_path)) is None


def test_the_quantisations_the_model_check_accepts_are_those_of_the_platform(vllm_ascend: Path) -> None:
    package = vllm_ascend / "vllm_ascend"
    (owner,) = (
        node
        for node in tree(package / "platform.py").body
        if isinstance(node, ast.ClassDef) and node.name == "NPUPlatform"
    )
    (assigned,) = (
        node
        for node in owner.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "supported_quantization"
    )
    assert isinstance(assigned.value, ast.List)
    supported = {
        constant(package / "utils.py", item.id) if isinstance(item, ast.Name) else ast.literal_eval(item)
        for item in assigned.value.elts
    }
    assert {models.MODELSLIM, "compressed-tensors", "fp8"} <= supported
    assert not {"awq", "gptq", "bitsandbytes"} & supported


def test_the_message_about_a_wheel_for_another_part_is_understood(vllm_ascend: Path) -> None:
    check = functions(
        vllm_ascend / "vllm_ascend/utils.py",
        ["check_ascend_device_type"],
        AscendDeviceType=_Part,
        _ascend_device_type=_Part.A2,
        torch_npu=SimpleNamespace(npu=SimpleNamespace(get_soc_version=lambda: 250)),
    )["check_ascend_device_type"]
    with pytest.raises(AssertionError) as raised:
        check()
    found = find_root_cause([f"AssertionError: {raised.value}".replace("_Part", "AscendDeviceType")], log.ROOT_CAUSES)
    assert found is not None
    assert found.message == "this vllm-ascend was built for A2, the device is A3"


def test_the_message_about_an_unhealthy_card_is_the_one_looked_for(vllm_ascend: Path) -> None:
    assert "NPU card health status is not OK" in (vllm_ascend / "vllm_ascend/worker/worker.py").read_text()


# -- torch-npu ---------------------------------------------------------------------------------------------------------

SEEN_OF_EIGHT = {
    None: 8,
    "": 0,
    "0,1": 2,
    "6,4": 0,
    "1,1": 0,
    "0, 1": 1,
    "0-3": 1,
    "0,9,1": 1,
    ",0": 0,
    "0,1,": 2,
    "NoDevFiles": 0,
}
"""ASCEND_RT_VISIBLE_DEVICES to the number of devices torch_npu sees where there are eight."""


@pytest.fixture
def device_count(torch_npu: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], int]:
    """Return torch_npu's own count for a value of the variable; only the driver's library is a fake."""

    class Driver:
        def drvGetDevNum(self, pointer: Any) -> int:  # noqa: N802
            pointer._obj.value = 8
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Driver())
    names = ["_parse_visible_devices", "_raw_device_count_ascend_hal", "_device_count_ascend_hal"]
    from typing import Union, cast

    world = {"os": os, "warnings": warnings, "cast": cast, "Union": Union, "List": list}
    count = functions(torch_npu / "torch_npu/npu/__init__.py", names, **world)["_device_count_ascend_hal"]

    def counted(value: str | None) -> int:
        if value is None:
            monkeypatch.delenv(visible.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(visible.VARIABLE, value)
        return int(count())

    return counted


@pytest.mark.parametrize(("value", "seen"), SEEN_OF_EIGHT.items())
def test_torch_npu_reads_the_variable_as_this_backend_expects(
    device_count: Callable[[str | None], int], value: str | None, seen: int
) -> None:
    assert device_count(value) == seen


def test_every_value_this_backend_writes_shows_torch_npu_exactly_those_devices(
    device_count: Callable[[str | None], int],
) -> None:
    for mask in range(1, 256):
        held = [device(index) for index in reversed(range(8)) if mask >> index & 1]
        assert device_count(visible.value(held)) == len(held)


@pytest.mark.parametrize("value", ["0,1", "0,2,7", "6,4", "1,1", "0, 1", "0-3", ",0", "0,x"])
def test_the_check_complains_exactly_where_torch_npu_sees_fewer_than_are_named(
    device_count: Callable[[str | None], int], value: str
) -> None:
    named = len(re.split(r"[,-]", value.strip(",")))
    assert (visible.complaint(value) is None) == (device_count(value) == named)


def test_torch_npu_brings_the_device_type_and_the_collective_backend_of_the_preflight(torch_npu: Path) -> None:
    text = (torch_npu / "torch_npu/__init__.py").read_text()
    assert 'rename_privateuse1_backend("npu")' in text
    assert 'Backend.register_backend("hccl"' in text


def test_every_part_torch_npu_knows_has_a_name_and_those_of_the_matrix_are_among_them(torch_npu: Path) -> None:
    library = (torch_npu / "torch_npu/lib/libtorch_npu.so").read_bytes()
    known = {match.decode() for match in re.findall(rb"Ascend(?:910|310P)[A-Za-z0-9_-]*(?=\0)", library)}
    names = {accelerator_name(name) for name in known}
    assert {"910B1", "910B4-1", "910_9391", "310P3"} <= names
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,63}", name) for name in names)
    in_matrix = {entry.accelerator for entry in load_matrix().entries if entry.kind == "ascend"}
    assert {name for name in in_matrix if not name.startswith("950")} <= names


def test_the_parts_that_are_refused_are_the_first_generation_of_torch_npus_list(torch_npu: Path) -> None:
    library = (torch_npu / "torch_npu/lib/libtorch_npu.so").read_bytes()
    known = {match.decode() for match in re.findall(rb"Ascend910[A-Za-z0-9_-]*(?=\0)", library)}
    refused = {name for name in map(accelerator_name, known) if models.is_first_generation(name)}
    assert refused == {"910A", "910B", "910ProA", "910ProB", "910PremiumA"}


def test_the_messages_looked_for_in_logs_are_those_of_torch_npu(torch_npu: Path) -> None:
    library = (torch_npu / "torch_npu/lib/libtorch_npu.so").read_bytes()
    for text in (b"NPU out of memory. Tried to allocate ", b"HCCL function error: ", b"NPU function error: "):
        assert text in library


# -- the hardware matrix -----------------------------------------------------------------------------------------------


def test_every_name_the_matrix_lists_is_spelt_like_its_row_by_this_backend() -> None:
    rows = [entry for entry in load_matrix().entries if entry.kind == "ascend"]
    assert rows
    for row in rows:
        assert {accelerator_name(name) for name in row.names} == {row.accelerator}


def test_the_matrix_agrees_on_resource_variable_collective_and_number_formats() -> None:
    for row in (entry for entry in load_matrix().entries if entry.kind == "ascend"):
        assert row.native_resource == AscendBackend.native_resource
        assert row.visible_devices_env == AscendBackend.visible_devices_env
        assert row.collective == "hccl"
        assert ("bfloat16" in row.dtypes) != models.is_310p(row.accelerator)
        assert ("pp" in row.features) != models.is_310p(row.accelerator)
