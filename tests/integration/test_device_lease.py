"""Leases against real processes: the kernel, not our code, must let go when a holder dies."""

import os
import signal
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from hetero_llm.cluster.lease import DeviceLease, holders, sweep
from hetero_llm.errors import DeviceBusy

HOLDER = """
import sys
from pathlib import Path
from hetero_llm.cluster.lease import DeviceLease
where, uids, count, replica = sys.argv[1:5]
lease = DeviceLease.acquire(uids.split(","), int(count), replica, deadline_s=5, where=Path(where))
if len(sys.argv) > 5:
    lease.note(scratch=sys.argv[5], shm=sys.argv[6].split(","), shm_prefix=sys.argv[7])
print(",".join(lease.uids), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(tmp_path):
    children = []

    def start(uids, count, name, *note):
        argv = [sys.executable, "-c", HOLDER, str(tmp_path), ",".join(uids), str(count), name, *map(str, note)]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child, tuple(child.stdout.readline().strip().split(","))

    yield start
    for child in children:
        child.kill()
        with child:
            pass


def test_two_replicas_of_one_node_get_disjoint_devices(hold, tmp_path):
    _, first = hold(["d0", "d1"], 1, "a")
    _, second = hold(["d0", "d1"], 1, "b")
    assert {*first, *second} == {"d0", "d1"}
    assert holders(["d0", "d1"], tmp_path) == {first[0]: "a", second[0]: "b"}


def test_a_third_is_refused_and_told_who_holds_what(hold, tmp_path):
    hold(["d0", "d1"], 2, "a")
    with pytest.raises(DeviceBusy) as refused:
        DeviceLease.acquire(["d0", "d1"], 1, "b", deadline_s=0.2, where=tmp_path)
    assert "needs 1 of 2 devices and only 0 are free" in str(refused.value)
    assert refused.value.report.cause == "d0 is held by a; d1 is held by a"


def test_a_group_takes_all_its_devices_or_none(hold, tmp_path):
    hold(["d0"], 1, "a")
    with pytest.raises(DeviceBusy):
        DeviceLease.acquire(["d0", "d1"], 2, "b", deadline_s=0.2, where=tmp_path)
    assert holders(["d0", "d1"], tmp_path) == {"d0": "a"}


def test_a_killed_holder_lets_go(hold, tmp_path):
    child, _ = hold(["d0"], 1, "a")
    child.send_signal(signal.SIGKILL)
    lease = DeviceLease.acquire(["d0"], 1, "b", deadline_s=5.0, where=tmp_path)
    assert holders(["d0"], tmp_path) == {"d0": "b"}
    lease.release()
    assert holders(["d0"], tmp_path) == {}


def test_a_child_that_inherits_the_lease_keeps_it_after_its_parent_let_go(tmp_path):
    lease = DeviceLease.acquire(["d0"], 1, "a", deadline_s=1.0, where=tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=lease.fds)
    for fd in lease.fds:
        os.close(fd)  # as when the parent dies: no unlock, only its copy of the file is gone
    assert list(holders(["d0"], tmp_path)) == ["d0"]
    child.communicate(b"\n")
    assert holders(["d0"], tmp_path) == {}


def test_the_next_holder_sweeps_what_a_killed_one_left_behind(hold, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    segment = shared_memory.SharedMemory(create=True, size=64)
    unseen = Path("/dev/shm", f"sem.mp-{os.getpid():x}test-abc")
    unseen.touch()
    child, _ = hold(["d0"], 1, "a", scratch, segment.name, f"{os.getpid():x}test")
    child.send_signal(signal.SIGKILL)
    child.wait()
    sweep(tmp_path)
    assert not scratch.exists()
    assert not unseen.exists()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(segment.name)
    segment.close()
    segment_unregister(segment)


def segment_unregister(segment):
    # Swept by another hand than multiprocessing's, which would otherwise warn about it at exit.
    from multiprocessing import resource_tracker

    resource_tracker.unregister(segment._name, "shared_memory")


def test_sweeping_touches_nothing_of_a_living_holder(hold, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    hold(["d0"], 1, "a", scratch, "no-such-segment", "no-such-prefix")
    sweep(tmp_path)
    assert scratch.exists()
    assert holders(["d0"], tmp_path) == {"d0": "a"}


def test_waiting_ends_as_soon_as_the_device_is_free(hold, tmp_path):
    child, _ = hold(["d0"], 1, "a")
    threading.Timer(0.3, child.stdin.close).start()
    lease = DeviceLease.acquire(["d0"], 1, "b", deadline_s=30.0, where=tmp_path)
    assert lease.uids == ("d0",)
    lease.release()
