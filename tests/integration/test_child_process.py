"""Trees of real processes: nothing survives `stop`, and every line of output is seen."""

import os
import sys
import threading
import time

import psutil

from hetero_llm.cluster.child import ChildProcess


def python(code, **options):
    lines = []
    child = ChildProcess([sys.executable, "-uc", code], env=dict(os.environ), on_line=lines.append, **options)
    return child, lines


def wait_for(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "condition not met in time"
        time.sleep(0.02)


def test_all_output_is_read_before_wait_returns():
    child, lines = python("import sys\nfor n in range(2000): print(n, file=sys.stderr if n % 2 else sys.stdout)")
    assert child.wait(30.0) == 0
    assert sorted(map(int, lines)) == list(range(2000))


def test_output_that_is_not_utf8_is_kept_readable():
    child, lines = python(r"import sys; sys.stdout.buffer.write(b'caf\xe9\n')")
    child.wait(30.0)
    assert lines == ["caf\N{REPLACEMENT CHARACTER}"]


def test_stop_ends_grandchildren_that_ignore_sigterm():
    code = (
        "import signal, subprocess, sys, time\n"
        "inner = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)'\n"
        "print(subprocess.Popen([sys.executable, '-c', inner]).pid)\n"
        "time.sleep(600)"
    )
    child, lines = python(code)
    wait_for(lambda: lines)
    grandchild = psutil.Process(int(lines[0]))
    child.stop(grace_s=0.2)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert child.exit_code() is not None


def test_stop_ends_a_grandchild_whose_parent_died_before():
    code = (
        "import subprocess, sys\n"
        "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid)\n"
        "input()"
    )
    child, lines = python(code, stdin=True)
    wait_for(lambda: lines)
    assert len(child.tree()) == 2
    child.process.stdin.close()
    child.wait(10.0)
    grandchild = psutil.Process(int(lines[0]))
    child.stop(grace_s=0.2)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


def test_stop_twice_is_fine():
    child, _ = python("import time; time.sleep(600)")
    child.stop(grace_s=1.0)
    child.stop(grace_s=1.0)


def test_the_whole_tree_is_pinned_to_the_given_cores():
    core = min(os.sched_getaffinity(0))
    code = (
        "import os, subprocess, sys\n"
        "print(*os.sched_getaffinity(0))\n"
        "subprocess.run([sys.executable, '-c', 'import os; print(*os.sched_getaffinity(0))'])"
    )
    child, lines = python(code, cores=[core])
    child.wait(30.0)
    assert lines == [str(core)] * 2


def test_the_child_stays_in_the_callers_process_group():
    child, lines = python("import os; print(os.getpgid(0))")
    child.wait(30.0)
    assert lines == [str(os.getpgid(0))]


def test_no_thread_is_left_behind():
    before = threading.active_count()
    child, _ = python("print('x')")
    child.stop(grace_s=5.0)
    assert threading.active_count() == before
