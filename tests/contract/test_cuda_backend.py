"""What the NVIDIA backend relies on, checked against the real vLLM, torch, Ray and nvidia-ml-py that are installed.

The vLLM here is its CPU build, whose Python sources are those of the CUDA build; nothing of it is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pynvml
import pytest
from fake_nvml import GIB, Gpu, Instance, Library, plugged_in, uuid
from hetero_llm_cuda import engine, fit, log, nvml, visible
from hetero_llm_cuda.plugin import CudaBackend

from hetero_llm.inventory.probe import probe_kinds
from hetero_llm.plugin import API_VERSION, Device, EngineSpec
from hetero_llm.plugin.rootcause import find_root_cause

HEAVY = ("torch", "vllm", "ray", "numpy", "pynvml", "cupy")
HANG = "unsigned int sleep(unsigned int); int nvmlInitWithFlags(unsigned int f) { for (;;) sleep(60); }"
CRASH = "void abort(void); int nvmlInitWithFlags(unsigned int f) { abort(); }"
SWAPPED = """
int cuInit(unsigned f) { return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = i; return 0; }
int cuDeviceGetUuid_v2(unsigned char *u, int d) { for (int i = 0; i < 16; i++) u[i] = i; return 0; }
"""


def package(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


VLLM = package("vllm")


def run_code(code: str, environ: Mapping[str, str] | None = None) -> str:
    env = os.environ if environ is None else environ
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=env
    )
    return done.stdout.strip()


def compiled(folder: Path, name: str, source: str) -> Path:
    """Build a small shared library: what is loaded in the place of the vendor's."""
    (folder / "source.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(folder / name), str(folder / "source.c")], check=True, timeout=60
    )
    return folder


def device(index: int = 0, uid: str = uuid(0)) -> Device:
    return Device(kind="cuda", accelerator="H100-80GB", uid=uid, index=index, memory_bytes=80 * GIB)


def spec(*devices: Device, **changes: Any) -> EngineSpec:
    return EngineSpec(
        **{
            "model_path": "/models/toy",
            "served_name": "toy",
            "devices": devices,
            "tp": len(devices),
            "pp": 1,
            "host": "127.0.0.1",
            "port": 4000,
            "max_model_len": 512,
            "kv_cache_bytes": GIB,
            **changes,
        }
    )


# -- The plugin API ----------------------------------------------------------------------------------------------------


def test_the_class_attributes_are_in_the_documented_shape() -> None:
    assert (CudaBackend.kind, CudaBackend.api_version, CudaBackend.native_resource) == ("cuda", API_VERSION, "GPU")
    assert CudaBackend.visible_devices_env == "CUDA_VISIBLE_DEVICES"
    assert "ASCEND_RT_VISIBLE_DEVICES" in CudaBackend.other_visible_envs
    assert "CUDA_VISIBLE_DEVICES" not in CudaBackend.other_visible_envs


def test_importing_the_plugin_loads_no_vendor_library() -> None:
    code = f"import sys, hetero_llm_cuda.plugin; print(sorted(set({HEAVY}) & set(sys.modules)))"
    assert run_code(code) == "[]"


def test_discovery_versions_and_doctor_load_no_torch_vllm_or_ray() -> None:
    code = (
        "import sys; from hetero_llm_cuda.plugin import CudaBackend; b = CudaBackend(); b.discover(); b.versions();"
        f"b.doctor(); print(sorted(set({HEAVY}) & set(sys.modules) - {{'pynvml'}}))"
    )
    assert run_code(code) == "[]"


@pytest.mark.slow
def test_a_driver_library_that_hangs_costs_its_deadline_and_hides_no_other_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, "libnvidia-ml.so.1", HANG)))
    # Long enough for the other kind to answer on a busy machine.
    probes = probe_kinds(("cuda", "cpu"), deadline_s=12)
    assert [problem.code for problem in probes["cuda"].discovery.problems] == ["HL202"]
    assert probes["cuda"].discovery.devices == ()
    assert probes["cpu"].discovery.devices


def test_a_driver_library_that_crashes_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(compiled(tmp_path, "libnvidia-ml.so.1", CRASH)))
    (problem,) = probe_kinds(("cuda",), deadline_s=60)["cuda"].discovery.problems
    assert problem.code == "HL203"


# -- nvidia-ml-py ------------------------------------------------------------------------------------------------------


def test_every_question_asked_is_a_function_of_the_binding() -> None:
    folder = package("hetero_llm_cuda")
    asked = {name for path in folder.glob("*.py") for name in re.findall(r"\bnvml[A-Z]\w+", path.read_text())}
    assert len(asked) > 20
    assert {name for name in asked if not hasattr(pynvml, name)} == set()


def test_the_binding_is_one_module_and_the_old_package_was_a_folder() -> None:
    assert not hasattr(pynvml, "__path__")
    assert pynvml.__file__.endswith("pynvml.py")


def test_statuses_are_classes_of_their_own_with_the_number_they_were_made_from() -> None:
    for name in ("NOT_SUPPORTED", "GPU_IS_LOST", "LIB_RM_VERSION_MISMATCH", "LIBRARY_NOT_FOUND", "RESET_REQUIRED"):
        number = getattr(pynvml, f"NVML_ERROR_{name}")
        error = pynvml.NVMLError(number)
        assert type(error) is not pynvml.NVMLError
        assert error.value == number


def test_the_binding_without_a_driver_says_that_the_library_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    # ctypes is the boundary: the binding's own handling of a missing library runs.
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", no_library)
    with pytest.raises(nvml.NvmlUnusable) as unusable, nvml.opened():
        pass
    assert unusable.value.absent


# -- torch -------------------------------------------------------------------------------------------------------------

VALUES = (
    "", "0", "0,1", "1,0", "1,1", "0,-1,2", "-1", " 0 , 1 ", "0 1", "1gpu2,2ampere", "NoDevFiles", "x", "0,x,1", "+1,2",
    "007", "GPU-1,GPU-2", "GPU-1,GPU-1", "GPU-1,2", "GPU-1,MIG-2", "MIG-1,MIG-2", "MIG-1,GPU-2", "2,GPU-1", "0,,1",
    ",0", "0,1,",
)  # fmt: skip


@pytest.mark.slow
def test_visible_devices_are_read_as_torch_reads_them() -> None:
    code = (
        "import json, os, sys, torch\n"
        "def read(value):\n"
        "    os.environ['CUDA_VISIBLE_DEVICES'] = value\n"
        "    return [str(found) for found in torch.cuda._parse_visible_devices()]\n"
        "print(json.dumps([read(value) for value in json.loads(sys.stdin.read())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(VALUES), capture_output=True, text=True, check=True, timeout=120
    )
    theirs = {value: tuple(found) for value, found in zip(VALUES, json.loads(done.stdout), strict=True)}
    assert {value: visible.visible_ids(value) for value in VALUES} == theirs


# -- Ray ---------------------------------------------------------------------------------------------------------------


def test_ray_hands_out_gpu_ids_in_the_variable_and_keeps_their_words() -> None:
    code = (
        "import os\n"
        "from ray._private.accelerators import NvidiaGPUAcceleratorManager as M\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '1,MIG-x,GPU-y'\n"
        "print(M.get_resource_name(), M.get_visible_accelerator_ids_env_var(),"
        " M.get_current_process_visible_accelerator_ids())"
    )
    assert run_code(code) == "GPU CUDA_VISIBLE_DEVICES ['1', 'MIG-x', 'GPU-y']"


# -- vLLM --------------------------------------------------------------------------------------------------------------


def tree(path: str) -> ast.Module:
    return ast.parse((VLLM / path).read_text())


def class_of(module: ast.Module, name: str) -> ast.ClassDef:
    return next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)


def constants(cls: ast.ClassDef) -> dict[str, object]:
    """Return the class attributes that are set to a constant."""
    return {
        node.target.id: node.value.value
        for node in cls.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Constant)
    }


def test_vllms_cuda_platform_reads_this_variable_and_meets_over_nccl() -> None:
    found = constants(class_of(tree("platforms/cuda.py"), "CudaPlatformBase"))
    assert found["device_control_env_var"] == CudaBackend.visible_devices_env
    assert found["ray_device_key"] == CudaBackend.native_resource
    assert found["dist_backend"] == "nccl"


def control_id() -> Any:
    """Return vLLM's own function from a word of the variable to a number of NVML, taken out of its source."""
    cls = class_of(tree("platforms/cuda.py"), "NvmlCudaPlatform")
    function = next(
        node
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "device_control_id_to_physical_device_id"
    )
    function.decorator_list = []
    names: dict[str, Any] = {"pynvml": pynvml}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "vllm", "exec"), names)
    return lambda word: names[function.name](None, word)


def test_vllm_takes_the_numbers_this_backend_writes_as_nvmls() -> None:
    words = engine.device_env((device(0), device(10)))["CUDA_VISIBLE_DEVICES"].split(",")
    assert [control_id()(word) for word in words] == [0, 10]


def test_vllm_asks_nvml_for_words_that_are_no_numbers_instead_of_failing_on_them() -> None:
    instance = Instance(uuid="MIG-0")
    with plugged_in(Library(Gpu(uuid=uuid(0), mig=(instance,)))):
        pynvml.nvmlInit()
        # It finds the instance; that NVML then tells the number within the card is vLLM's business.
        with pytest.raises(pynvml.NVMLError_FunctionNotFound):
            control_id()("MIG-0")
        with pytest.raises(pynvml.NVMLError_NotFound):
            control_id()("MIG-9")
        pynvml.nvmlShutdown()


def test_quantisation_methods_need_the_capability_vllm_states() -> None:
    stated: dict[str, int] = {}
    for path in (VLLM / "model_executor/layers/quantization").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                stated |= _name_and_capability(node)
    ours = {name: major * 10 + minor for name, (major, minor) in fit.QUANTIZATIONS.items()}
    # The two whose class has another name than the method in a model's configuration.
    aliases = {"awq": "auto_awq", "gptq": "auto_gptq"}
    assert {name: stated.get(name, stated.get(aliases.get(name, ""))) for name in ours} == ours


def _name_and_capability(cls: ast.ClassDef) -> dict[str, int]:
    returned = {
        function.name: statement.value.value
        for function in cls.body
        if isinstance(function, ast.FunctionDef) and function.name in ("get_name", "get_min_capability")
        for statement in function.body
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Constant)
    }
    return {returned["get_name"]: returned["get_min_capability"]} if len(returned) == 2 else {}


def test_vllm_refuses_bfloat16_below_the_capability_this_backend_names() -> None:
    cls = class_of(tree("platforms/cuda.py"), "CudaPlatformBase")
    check = next(n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == "check_if_supports_dtype")
    asked = [
        node.args[0].value
        for node in ast.walk(check)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr == "has_device_capability" and isinstance(node.args[0], ast.Constant)
    ]  # fmt: skip
    major, minor = fit.BFLOAT16_CAPABILITY
    assert asked == [major * 10 + minor]


def test_every_flag_of_the_command_is_one_of_vllms() -> None:
    # The file moved between versions; its name did not.
    frontend = [
        path for path in (VLLM / "entrypoints").rglob("cli_args.py") if "class FrontendArgs" in path.read_text()
    ]
    sources = [path.read_text() for path in (*frontend, VLLM / "engine/arg_utils.py")]
    fields = {
        node.target.id
        for source in sources
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    known = {f"--{field.replace('_', '-')}" for field in fields} | set(re.findall(r'"(--[a-z-]+)"', "".join(sources)))
    nodes = spec(device(0), device(1), node_count=2, node_rank=1, master_address="127.0.0.1", master_port=5000)
    written = {word for word in engine.engine(nodes).argv if word.startswith("--")}
    assert "--headless" in written
    assert written - known == set()


def test_the_program_the_entry_becomes_is_vllms_command_line() -> None:
    assert 'if __name__ == "__main__"' in (VLLM / "entrypoints/cli/main.py").read_text()


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("v1/worker/utils.py", ("Free memory on device ", " GiB) on startup ", "is less than desired GPU memory util")),
        ("platforms/cuda.py", ("Bfloat16 is only supported on GPUs ", "with compute capability of at least 8.0. ")),
        ("platforms/cuda.py", ("No valid attention backend found for ",)),
        ("config/parallel.py", ("is larger than the number of ", "available GPUs (")),
        (
            "config/vllm.py",
            ("The quantization method ", "is not supported for the current GPU", "Current capability: "),
        ),
        ("v1/worker/gpu_model_runner.py", ("CUDA out of memory occurred when warming up sampler with ",)),
        ("v1/worker/gpu_model_runner.py", ("Capturing CUDA graphs",)),
        ("v1/core/kv_cache_utils.py", ("%s KV cache size: %s tokens",)),
        ("compilation/backends.py", ("Dynamo bytecode transform time",)),
        ("distributed/device_communicators/pynccl_wrapper.py", ("NCCL error: ",)),
        # Why the pre-flight insists on the backend it was told: without, this is all that vLLM says.
        ("distributed/parallel_state.py", ("is not available; falling back to gloo.",)),
    ],
)
def test_the_messages_that_are_looked_for_stand_in_vllms_sources(path: str, parts: tuple[str, ...]) -> None:
    source = (VLLM / path).read_text()
    assert [part for part in parts if part not in source] == []


# -- The entry, as a process -------------------------------------------------------------------------------------------


def test_an_engine_that_sees_another_device_ends_at_once_with_the_cause(tmp_path: Path) -> None:
    launch = engine.engine(spec(device(0)))
    env = {name: value for name, value in os.environ.items() if name not in launch.env_remove} | dict(launch.env)
    env["LD_LIBRARY_PATH"] = str(compiled(tmp_path, "libcuda.so.1", SWAPPED))
    done = subprocess.run(launch.argv, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    cause = find_root_cause(done.stderr.splitlines(), log.ROOT_CAUSES)
    assert cause is not None
    assert cause.message.startswith(f"the engine does not see its devices: meant were {uuid(0)}; with CUDA_VISIBLE_")
    assert "00010203-0405-0607-0809-0a0b0c0d0e0f" in cause.message
