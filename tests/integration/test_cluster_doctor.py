"""Nodes of a real cluster examine themselves."""

import contextlib
import dataclasses
import os
import platform
import signal

import psutil
import pytest
import stub_backend
from local_cluster import local_place, ray, wait_for

from hetero_llm.cli.checks_cluster import check_answers, cluster_checks
from hetero_llm.cluster.doctor import _examine, examine_nodes
from hetero_llm.cluster.session import start_local

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def place():
    with local_place() as box:
        yield box


@pytest.fixture(scope="module")
def session(place):
    """A cluster of two nodes, `here` and `there`, each a Ray node of its own."""
    here = stub_backend.node(2)
    devices = tuple(dataclasses.replace(d, kind="other", uid=f"other-{d.index}") for d in here.devices)
    there = dataclasses.replace(here, node="there", kind="other", devices=devices)
    with contextlib.closing(start_local([here, there], {"stub": None, "other": None})) as session:
        yield session


def test_each_node_tells_its_versions_its_clock_and_what_its_own_doctor_found(session):
    answers = examine_nodes(session)
    assert [(answer.node, answer.error) for answer in answers] == [("here", None), ("there", None)]
    for answer in answers:
        assert (answer.ray_version, answer.python_version) == (ray.__version__, platform.python_version())
        # The same machine, so the same clock: no more may be measured than the measurement leaves open.
        assert abs(answer.clock_offset_s) <= answer.clock_error_s + 0.001
        assert {"python", "ray", "state", "platform-plugins"} <= {check.name for check in answer.checks}
    assert answers[0].resources["hetero_stub:s1"] == 2.0
    assert answers[1].resources["hetero_other:s1"] == 2.0


def test_the_nodes_agree_with_each_other_and_ray_with_them(session):
    checks = cluster_checks(examine_nodes(session), {"stub": None, "other": None})
    assert [(check.name, check.text) for check in checks if check.ok is not True] == []
    assert {"cluster.ray", "cluster.clock", "here.count", "there.count"} < {check.name for check in checks}


def test_one_node_can_be_asked_alone(session):
    assert [answer.node for answer in examine_nodes(session, only="there")] == ["there"]
    assert examine_nodes(session, only="elsewhere") == ()


def test_nodes_that_do_not_answer_in_time_are_told_so(session):
    answers = examine_nodes(session, deadline_s=0.01)
    assert all("within 0.01 s" in answer.error and answer.checks == () for answer in answers)
    assert len(answers) == 2


def test_an_examination_that_hangs_leaves_no_process_behind(place, monkeypatch):
    folder = place.root / "hanging"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(f"""
import os, subprocess, time
tools = [subprocess.Popen(["sleep", "600"], start_new_session=own) for own in (False, True)]
with open({str(folder / "pids")!r}, "w") as pids:
    pids.write(" ".join(str(pid) for pid in (os.getpid(), *(tool.pid for tool in tools))))
time.sleep(600)
""")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert "did not end there within 6 s" in _examine(6.0)["error"]
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    assert len(pids) == 3
    wait_for(lambda: not any(map(_runs, pids)), 30.0)


def test_the_command_shows_the_checks_of_all_nodes_and_those_that_compare_them(session, place):
    env = {name: os.environ[name] for name in ("RAY_AUTH_TOKEN_PATH", "PYTHONPATH")}
    data = place.json("doctor", "--node", "all", "--address", session.address, **env)
    assert [node["node"] for node in data["nodes"]] == ["here", "there"]
    assert all(node["checks"] for node in data["nodes"])
    assert {check["name"] for check in data["checks"]} >= {"cluster.nodes", "here.count", "there.count"}
    unknown = place.run("doctor", "--node", "nobody", "--address", session.address, **env)
    assert unknown.returncode == 2
    assert "no node 'nobody'" in unknown.stderr


def test_a_node_that_died_is_told_so_and_does_not_keep_the_other_from_answering(session):
    (raylet,) = [p for p in psutil.process_iter(["cmdline"]) if _is_raylet_of(p, f"{session.temp_dir}/other")]
    raylet.send_signal(signal.SIGKILL)
    wait_for(lambda: not all(node.alive for node in session.inventory().nodes), 60.0)
    here, there = examine_nodes(session)
    assert (here.error, there.error) == (None, "Ray says this node is down")
    assert check_answers((here, there)).ok is False


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_raylet_of(process, folder):
    words = process.info["cmdline"] or []
    return bool(words) and words[0].endswith("/raylet") and folder in " ".join(words)
