"""Trees of real processes: nothing survives `stop`, and every line of output is seen."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

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


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


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
    assert is_gone(grandchild)
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
    grandchild = psutil.Process(int(lines[0]))
    child.stdin.close()
    wait_for(lambda: child.tree() == (grandchild,))
    child.stop(grace_s=0.2)
    assert is_gone(grandchild)


# A tree of three: the middle one has a session of its own and is gone, the last one ignores what can be ignored.
ORPHAN = (
    "import os, signal, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork():\n"
    "        os._exit(0)\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    print(os.getpid())\n"
    "    time.sleep(600)\n"
)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), 11)", -11),
        ("os.kill(os.getpid(), 15)", -15),
        ("signal.signal(13, signal.SIG_DFL); os.kill(os.getpid(), 13)", -13),
    ],
)
def test_a_tree_ends_with_its_root_and_the_way_it_did(end, code):
    child, lines = python(f"{ORPHAN}input()\n{end}", stdin=True)
    wait_for(lambda: lines)
    orphan = psutil.Process(int(lines[0]))
    child.stdin.write(b"\n")
    child.stdin.flush()
    assert child.wait(10.0) == code
    assert is_gone(orphan)
    child.stop(grace_s=0.2)


def test_the_rest_of_a_tree_may_say_what_went_wrong_after_its_root_ended():
    code = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    time.sleep(0.3)\n"
        "    print('out of memory')\n"
        "    os._exit(1)\n"
        "os._exit(1)"
    )
    child, lines = python(code)
    assert child.wait(10.0) == 1
    assert lines == ["out of memory"]
    child.stop(grace_s=0.2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_starter_that_is_killed_takes_the_whole_tree_along_without_anybodys_help(number):
    # One write each: two threads speak.
    starter = (
        "import os, sys, time\n"
        "from hetero_llm.cluster.child import ChildProcess\n"
        "def say(words): sys.stdout.write(f'{words}\\n')\n"
        f"tree = {ORPHAN + 'time.sleep(600)'!r}\n"
        "child = ChildProcess([sys.executable, '-uc', tree], env=dict(os.environ), on_line=say)\n"
        "say(f'program {child.pid}')\n"
        "time.sleep(600)"
    )
    # A session of its own: nothing but the keeper knows what belongs together.
    argv = [sys.executable, "-uc", starter]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said = sorted((process.stdout.readline().split() for _ in range(2)), key=len)
            orphan, program = (psutil.Process(int(words[-1])) for words in said)
            kept = [orphan, program, program.parent()]
        finally:
            process.send_signal(number)
    wait_for(lambda: all(map(is_gone, kept)), deadline_s=5.0)


def test_who_kills_the_whole_group_of_the_starter_does_not_miss_what_left_it():
    starter = (
        "import os, sys, time\n"
        "from hetero_llm.cluster.child import ChildProcess\n"
        f"tree = {ORPHAN + 'time.sleep(600)'!r}\n"
        "child = ChildProcess([sys.executable, '-uc', tree], env=dict(os.environ), on_line=print)\n"
        "time.sleep(600)"
    )
    argv = [sys.executable, "-uc", starter]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        orphan = psutil.Process(int(process.stdout.readline()))
        os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: is_gone(orphan), deadline_s=5.0)


def test_a_process_whose_name_is_no_text_does_not_disturb_the_keeper():
    name = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'\\xff\\xfe)', 0, 0, 0); print('x'); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-uc", name], stdout=subprocess.PIPE) as odd:
        try:
            odd.stdout.readline()
            child, lines = python(f"{ORPHAN}sys.exit(3)")
            assert child.wait(10.0) == 3
            assert not psutil.pid_exists(int(lines[0]))
        finally:
            odd.kill()


def test_a_keeper_that_is_killed_takes_the_program_along():
    child, _ = python("import time; time.sleep(600)")
    program = psutil.Process(child.pid)
    program.parent().kill()
    assert child.wait(5.0) == -signal.SIGKILL
    wait_for(lambda: is_gone(program), deadline_s=5.0)
    child.stop(grace_s=0.2)


def test_a_program_that_cannot_be_started_is_an_error_of_the_starter(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        ChildProcess(["/no-such-program"], env={}, on_line=print)
    with pytest.raises(PermissionError):
        ChildProcess([str(tmp_path)], env={}, on_line=print)


def test_the_child_has_the_environment_descriptors_and_signals_it_was_given():
    reader, writer = os.pipe()
    code = (
        "import os, signal, sys\n"
        f"os.write({writer}, b'x')\n"
        "print(os.environ['HETERO_TEST'])\n"
        "print([signal.getsignal(n) is signal.SIG_DFL for n in (15, 1, 17)], signal.pthread_sigmask(0, ()))"
    )
    lines = []
    child = ChildProcess(
        [sys.executable, "-uc", code],
        env={**os.environ, "HETERO_TEST": "given"},
        on_line=lines.append,
        pass_fds=[writer],
    )
    assert child.wait(30.0) == 0
    assert os.read(reader, 1) == b"x"
    assert lines == ["given", "[True, True, True] set()"]
    for fd in (reader, writer):
        os.close(fd)
    child.stop(grace_s=0.2)


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
