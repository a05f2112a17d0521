"""Core groups and memory, read from trees that stand for /proc and /sys of other machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hetero_llm_cpu import discovery, topology

GIB = 1 << 30
AVX512 = "fpu sse2 avx2 avx512f avx512bw avx512dq avx512vl"


def machine(
    root: Path,
    numa: Mapping[int, Sequence[Sequence[int]]],
    *,
    node_gib: float = 16,
    free_gib: float = 12,
    model: str = "AMD EPYC 9354 32-Core Processor",
    flags: str = AVX512,
) -> Path:
    """Write a machine: per NUMA node a list of physical cores, each a list of its logical CPUs."""
    kib = 1 << 20
    write(root, "proc/cpuinfo", f"processor\t: 0\nmodel name\t: {model}\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    total, free = int(node_gib * kib * len(numa)), int(free_gib * kib * len(numa))
    write(root, "proc/meminfo", f"MemTotal:       {total} kB\nMemAvailable:   {free} kB\n")
    write(root, "proc/self/cgroup", "0::/\n")
    for node, cores in numa.items():
        folder = f"sys/devices/system/node/node{node}"
        write(root, f"{folder}/cpulist", ",".join(str(cpu) for core in cores for cpu in core))
        write(
            root,
            f"{folder}/meminfo",
            f"Node {node} MemTotal:       {int(node_gib * kib)} kB\nNode {node} MemFree:  {int(free_gib * kib)} kB\n"
            f"Node {node} Active(file): 0 kB\nNode {node} Inactive(file): 0 kB\nNode {node} SReclaimable: 0 kB\n",
        )
        for core in cores:
            for cpu in core:
                base = f"sys/devices/system/cpu/cpu{cpu}/topology"
                write(root, f"{base}/thread_siblings_list", ",".join(str(c) for c in core) + "\n")
                write(root, f"{base}/physical_package_id", f"{node}\n")
    return root


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def cpus(numa: Mapping[int, Sequence[Sequence[int]]]) -> frozenset[int]:
    return frozenset(cpu for cores in numa.values() for core in cores for cpu in core)


def groups(root: Path, allowed: frozenset[int]) -> list[tuple[int, ...]]:
    return [device.cores for device in discovery.discover(root, allowed, "host").devices]


@pytest.fixture(autouse=True)
def _no_group_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(discovery.GROUP_ENV, raising=False)


def test_two_cores_are_two_devices_of_one_core(tmp_path: Path) -> None:
    numa = {0: [[0], [1]]}
    found = discovery.discover(machine(tmp_path, numa), cpus(numa), "box").devices
    assert [(d.uid, d.index, d.cores, d.numa) for d in found] == [
        ("cpu-box-0-0", 0, (0,), 0),
        ("cpu-box-1-1", 1, (1,), 0),
    ]


def test_a_single_core_is_one_device(tmp_path: Path) -> None:
    assert groups(machine(tmp_path, {0: [[0]]}), frozenset({0})) == [(0,)]


def test_both_siblings_of_a_physical_core_belong_to_its_device(tmp_path: Path) -> None:
    numa = {0: [[0, 4], [1, 5], [2, 6], [3, 7]]}
    assert groups(machine(tmp_path, numa), cpus(numa)) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_a_device_never_spans_numa_nodes_and_indices_go_on(tmp_path: Path) -> None:
    numa = {0: [[0], [1], [2]], 1: [[3], [4], [5]]}
    found = discovery.discover(machine(tmp_path, numa), cpus(numa), "box").devices
    assert [(d.index, d.numa, d.cores) for d in found] == [
        (0, 0, (0,)), (1, 0, (1,)), (2, 0, (2,)), (3, 1, (3,)), (4, 1, (4,)), (5, 1, (5,)),
    ]  # fmt: skip


def test_the_default_group_has_at_most_eight_cores(tmp_path: Path) -> None:
    numa = {0: [[cpu] for cpu in range(64)]}
    assert [len(cores) for cores in groups(machine(tmp_path, numa), cpus(numa))] == [8] * 8


def test_only_cores_of_the_affinity_count(tmp_path: Path) -> None:
    numa = {0: [[0, 4], [1, 5], [2, 6], [3, 7]]}
    assert groups(machine(tmp_path, numa), frozenset({1, 2, 6})) == [(1,), (2, 6)]


def test_the_group_size_can_be_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(discovery.GROUP_ENV, "3")
    numa = {0: [[cpu] for cpu in range(8)]}
    assert groups(machine(tmp_path, numa), cpus(numa)) == [(0, 1, 2), (3, 4, 5)]


def test_a_group_larger_than_the_numa_node_is_one_device_and_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(discovery.GROUP_ENV, "16")
    found = discovery.discover(machine(tmp_path, {0: [[0], [1]]}), frozenset({0, 1}), "box")
    assert [device.cores for device in found.devices] == [(0, 1)]
    assert "asks for 16 cores per device, NUMA node 0 has 2" in found.problems[0].text


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_an_unreadable_group_size_is_a_problem_and_the_default_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(discovery.GROUP_ENV, text)
    found = discovery.discover(machine(tmp_path, {0: [[0], [1]]}), frozenset({0, 1}), "box")
    assert len(found.devices) == 2
    assert repr(text) in found.problems[0].text


def test_memory_of_a_numa_node_is_shared_by_its_devices(tmp_path: Path) -> None:
    numa = {0: [[0], [1]], 1: [[2], [3]]}
    found = discovery.discover(machine(tmp_path, numa, node_gib=16, free_gib=12), cpus(numa), "box").devices
    assert {(d.memory_bytes, d.free_bytes) for d in found} == {(8 * GIB, 6 * GIB)}


def test_a_cgroup_v2_limit_bounds_total_and_free_memory(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0]]}, node_gib=16, free_gib=12)
    write(tmp_path, "proc/self/cgroup", "0::/app\n")
    write(tmp_path, "sys/fs/cgroup/app/memory.max", f"{4 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/app/memory.current", f"{3 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/app/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    memory = topology.memory_by_numa(tmp_path)[0]
    assert (memory.total_bytes, memory.free_bytes) == (4 * GIB, 3 * GIB)


def test_the_tightest_limit_of_all_parents_holds(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0]]})
    write(tmp_path, "proc/self/cgroup", "0::/pod/app\n")
    write(tmp_path, "sys/fs/cgroup/pod/app/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/pod/memory.max", f"{2 * GIB}\n")
    assert topology.cgroup_memory(tmp_path) == (2 * GIB, None)


def test_a_cgroup_v1_limit_is_found_at_the_mount_of_a_container(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0]]})
    write(tmp_path, "proc/self/cgroup", "4:memory:/docker/0123abcd\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{8 * GIB}\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{GIB}\n")
    assert topology.cgroup_memory(tmp_path) == (8 * GIB, GIB)


def test_the_huge_number_of_cgroup_v1_means_no_limit(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0]]})
    write(tmp_path, "proc/self/cgroup", "4:memory:/\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert topology.cgroup_memory(tmp_path) == (None, None)


def test_two_numa_nodes_share_a_cgroup_limit(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0]], 1: [[1]]}, node_gib=16)
    write(tmp_path, "sys/fs/cgroup/memory.max", f"{8 * GIB}\n")
    assert [m.total_bytes for m in topology.memory_by_numa(tmp_path).values()] == [4 * GIB, 4 * GIB]


def test_without_numa_files_there_is_one_node_with_the_systems_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n")
    found = discovery.discover(tmp_path, frozenset({0, 1}), "box").devices
    assert [(d.numa, d.memory_bytes, d.free_bytes) for d in found] == [(0, GIB // 2, GIB // 4)] * 2


def test_memory_in_use_is_shared_by_the_devices_of_a_node(tmp_path: Path) -> None:
    machine(tmp_path, {0: [[0], [1]]}, node_gib=16, free_gib=12)
    found = discovery.discover(tmp_path, frozenset({0, 1}), "box").devices
    assert [reading.used_bytes for reading in discovery.usage(found, tmp_path)] == [2 * GIB, 2 * GIB]


@pytest.mark.parametrize(
    ("model", "flags", "name"),
    [
        ("AMD EPYC 9354 32-Core Processor", AVX512, "epyc-avx512"),
        ("Intel(R) Xeon(R) Platinum 8370C CPU @ 2.80GHz", AVX512, "xeon-avx512"),
        ("Intel(R) Xeon(R) Processor", f"{AVX512} amx_tile amx_int8", "xeon-amx"),
        ("Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", "sse2 avx2", "x86-avx2"),
        ("AMD Ryzen 9 5950X 16-Core Processor", "sse2 avx2", "ryzen-avx2"),
        ("Intel(R) Xeon(R) CPU X5650", "sse2", "xeon-sse"),
        ("Intel(R) Xeon Phi(TM)", "sse2 avx2 avx512f avx512cd", "xeon-avx2"),
    ],
)
def test_the_accelerator_is_named_by_family_and_instruction_set(
    tmp_path: Path, model: str, flags: str, name: str
) -> None:
    assert discovery.accelerator_name(machine(tmp_path, {0: [[0]]}, model=model, flags=flags)) == name


@pytest.mark.parametrize(("features", "name"), [("fp asimd", "arm-neon"), ("fp asimd sve", "arm-sve")])
def test_arm_is_named_by_its_vector_unit(tmp_path: Path, features: str, name: str) -> None:
    write(tmp_path, "proc/cpuinfo", f"processor\t: 0\nFeatures\t: {features}\nCPU implementer\t: 0x41\n")
    assert discovery.accelerator_name(tmp_path) == name


@pytest.mark.parametrize(
    ("text", "numbers"), [("0-3,8\n", (0, 1, 2, 3, 8)), ("", ()), ("5", (5,)), ("0-1,4-5", (0, 1, 4, 5))]
)
def test_kernel_lists_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert topology.id_list(text) == numbers


@pytest.mark.parametrize(
    ("file", "text", "quota"),
    [("cpu.max", "150000 100000\n", 1.5), ("cpu.max", "max 100000\n", None), ("other", "", None)],
)
def test_the_cpu_quota_is_read(tmp_path: Path, file: str, text: str, quota: float | None) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, f"sys/fs/cgroup/{file}", text)
    assert topology.cgroup_cpu_quota(tmp_path) == quota


def test_the_cpu_quota_of_cgroup_v1_is_read(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "3:cpu,cpuacct:/\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert topology.cgroup_cpu_quota(tmp_path) == 2.5
