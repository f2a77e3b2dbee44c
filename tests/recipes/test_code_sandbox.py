"""The sandbox against real programs that misbehave, under root and under an ordinary user."""

import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from pathlib import Path

import pytest

from recipes.code_agent import sandbox, sandbox_isolation, sandbox_machine, sandbox_processes, scratch
from recipes.code_agent.sandbox import SandboxError, SandboxLimits, SandboxResult, SandboxRun, run_in_sandbox

IS_ROOT = os.geteuid() == 0
ORDINARY_USER = 65534
PYTHON = os.path.realpath(sys.executable)
SYSTEM_PYTHON = "/usr/bin/python3"
DOCKER_CAPABILITIES = [0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31]
RECIPES = Path(sandbox.__file__).parents[1]


def _shared_python():
    """An interpreter that other users may start."""
    for python in (PYTHON, SYSTEM_PYTHON):
        if os.path.exists(python) and sandbox_machine.is_open_to_others(python):
            return python
    pytest.skip("no interpreter on this machine may be started by other users")


@pytest.fixture(scope="module")
def shared_code():
    """A copy of the recipe that every user may read."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    shutil.copytree(RECIPES / "code_agent", folder / "recipes" / "code_agent")
    shutil.copy(Path(__file__).with_name("code_sandbox_child.py"), folder)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def _run_elsewhere(folder, code, limits, python, user=None, **request):
    request |= {"code": code, "limits": limits, "python": python}
    env = {"PYTHONPATH": str(folder), "CODE_SANDBOX_REQUEST": json.dumps(request), "SECRET": "in the environment"}
    child = subprocess.run(
        [python, "-B", str(folder / "code_sandbox_child.py")],
        env=env, user=user, group=user, extra_groups=None if user is None else [], capture_output=True, check=True,
        timeout=60,
    )  # fmt: skip
    reply = json.loads(child.stdout)
    if "sandbox_error" in reply:
        raise SandboxError(reply["sandbox_error"])
    return SandboxResult(**reply)


@pytest.fixture(params=["root", "ordinary user", "root with a container's capabilities"])
def run(request, shared_code):
    """Run Python code in the sandbox as one kind of user; afterwards nothing of it may be left."""
    marker = f"marker{secrets.token_hex(8)}"

    def as_this_user(code, **limits):
        return run_in_sandbox([PYTHON, "-I", "-S", "-B", "-c", f"{code}\n#{marker}"], "/usr", SandboxLimits(**limits))

    def as_ordinary_user(code, **limits):
        return _run_elsewhere(shared_code, f"{code}\n#{marker}", limits, _shared_python(), user=ORDINARY_USER)

    def in_a_container(code, **limits):
        return _run_elsewhere(shared_code, f"{code}\n#{marker}", limits, PYTHON, capabilities=DOCKER_CAPABILITIES)

    if request.param == "ordinary user":
        yield as_ordinary_user if IS_ROOT else as_this_user
    elif not IS_ROOT:
        pytest.skip("these tests run without root")
    else:
        yield as_this_user if request.param == "root" else in_a_container
    assert _processes_with(marker) == []
    _wait_until_gone(set(Path("/tmp").glob("verl_war_code_agent_*/*/sandbox-*")))


def _wait_until_gone(directories, limit_s=30.0):
    """Another run on this machine has sandboxes too, but only for seconds; what is left behind stays."""
    deadline_s = time.monotonic() + limit_s
    while left := {directory for directory in directories if directory.exists()}:
        assert time.monotonic() < deadline_s, f"left behind: {sorted(map(str, left))}"
        time.sleep(0.2)


def _processes_with(marker):
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if marker.encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found.append(int(name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
FILL_MEMORY = "import time\nkeep = []\nwhile True:\n    keep.append(bytearray(b'x' * 10**6))"
FILL_MEMORY_TOGETHER = (
    "import os, time\nfor _ in range(5):\n    if os.fork() == 0:\n        break\n"
    "keep = bytearray(b'x' * 40 * 10**6)\ntime.sleep(30)"
)
FILL_DISK = (
    "import os\nnumber = 0\nwhile True:\n    number += 1\n"
    "    with open(f\"{os.environ['HOME']}/{number}\", 'wb') as file:\n        file.write(b'x' * 10**6)"
)
MANY_SMALL_FILES = (
    "import os\nnumber = 0\nwhile True:\n    number += 1\n    open(f\"{os.environ['HOME']}/{number}\", 'w').close()"
)
NEST_DEEPLY = (
    "import os\nos.chdir(os.environ['HOME'])\nfor _ in range(1100):\n    os.mkdir('d' * 20)\n    os.chdir('d' * 20)\n"
    "open('file', 'w').write('x')\nos.chmod('..', 0)\nos.chmod('.', 0)\nprint('nested')"
)
BIG_FILE = (
    "import os\nwith open(os.environ['HOME'] + '/big', 'wb') as file:\n"
    "    while True:\n        file.write(b'x' * 10**6)"
)
DAEMON = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        os.closerange(0, 3)\n        time.sleep(60)\n    os._exit(0)\nos.wait()\nprint('parent done')"
)
ORPHANS = (
    "import os, time\nfor _ in range(20):\n    if os.fork() == 0:\n"
    "        os.setsid()\n        time.sleep(60)\nos._exit(7)"
)
IGNORE_SIGNALS = (
    "import signal, time\nfor number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:\n"
    "    signal.signal(number, signal.SIG_IGN)\nwhile True:\n    time.sleep(1)"
)

Attack = namedtuple("Attack", "code limits reasons exit_codes output", defaults=((), ""))
ATTACKS = {
    "fork bomb": Attack(FORK_BOMB, {"wall_s": 2}, ("wall time", "processes", "CPU time")),
    "endless loop": Attack("while True: pass", {"cpu_s": 1}, ("CPU time",)),
    "endless sleep": Attack("import time\ntime.sleep(60)", {"wall_s": 0.5}, ("wall time",)),
    "memory": Attack(FILL_MEMORY, {"memory_bytes": 10**8}, (None, "memory"), (1, -9)),
    "memory of many": Attack(FILL_MEMORY_TOGETHER, {"memory_bytes": 12 * 10**7}, ("memory",)),
    "disk": Attack(FILL_DISK, {"disk_bytes": 30 * 10**6}, ("disk",)),
    "many files": Attack(MANY_SMALL_FILES, {"disk_bytes": 8 * 10**6, "wall_s": 20, "cpu_s": 20}, ("disk",)),
    "deep directories": Attack(NEST_DEEPLY, {}, (None, "disk"), (0, -9)),
    "one big file": Attack(BIG_FILE, {"file_bytes": 10**7}, (None,), (1,), "File too large"),
    "daemon": Attack(DAEMON, {}, (None,), (0,), "parent done"),
    "orphans": Attack(ORPHANS, {}, (None,), (7,)),
    "deaf to signals": Attack(IGNORE_SIGNALS, {"wall_s": 1}, ("wall time",)),
    "endless output": Attack("while True: print('x' * 10**5)", {"printed_bytes": 10**8}, ("output", "CPU time")),
    "10 MB of output": Attack("print('a' + 'x' * 10**7 + 'z')", {}, (None,), (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(run, name):
    attack = ATTACKS[name]
    start_s = time.monotonic()
    result = run(attack.code, **attack.limits)
    assert result.killed_reason in attack.reasons, result
    assert result.timed_out == (result.killed_reason in ("wall time", "CPU time"))
    assert not attack.exit_codes or result.exit_code in attack.exit_codes, result
    assert attack.output in result.output
    assert len(result.output) < SandboxLimits().output_bytes + 100
    assert time.monotonic() - start_s < 40


def test_long_output_keeps_both_ends(run):
    result = run("print('first' + 'x' * 10**7 + 'last')", output_bytes=1000)
    assert result.output.startswith("first") and result.output.endswith("last\n")
    assert "bytes left out" in result.output


REFUSALS = {
    "internet socket": "import socket\nsocket.socket()",
    "IPv6 socket": "import socket\nsocket.socket(socket.AF_INET6)",
    "raw socket": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW)",
    "netlink socket": "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "packet socket": "import socket\nsocket.socket(socket.AF_PACKET)",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "name look-up": "import socket\nsocket.create_connection(('127.0.0.1', 80), 1)",
    "file elsewhere": "open('/tmp/code_sandbox_escape', 'w')",
    "file in shared memory": "open('/dev/shm/code_sandbox_escape', 'w')",
    "system file": "open('/etc/code_sandbox_escape', 'w')",
    "home of root": "import os\nos.listdir('/root')",
    "supervisor's signal": "import os\nos.kill(os.getppid(), 9)",
    "priority of root": "import os\nos.setuid(0)",
    "memory file": "import os\nos.memfd_create('x')",
    "new root": "import os\nos.chroot('/')",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_with_an_error(run, name):
    code = "\n    ".join(["try:", *REFUSALS[name].split("\n")])
    result = run(
        f"{code}\nexcept OSError as error:\n    print('refused', type(error).__name__)\nelse:\n    print('done')"
    )
    assert result.output.startswith("refused"), result


def test_a_signal_to_everyone_reaches_nobody_else(run):
    result = run("import os\ntry:\n    os.kill(-1, 9)\nexcept OSError:\n    pass\nprint('alive')")
    assert result.output == "alive\n" and result.exit_code == 0


def test_system_calls_that_go_around(run):
    calls = {"unshare": (272, 97, 0x10000000), "io_uring_setup": (425, 425, 1), "ptrace": (101, 117, 0)}
    column = {"x86_64": 0, "aarch64": 1}[os.uname().machine]
    numbers = [(call[column], call[2]) for call in calls.values()]
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for number, argument in {numbers}:\n    print(libc.syscall(number, argument, 0, 0, 0), ctypes.get_errno())"
    )
    assert run(code).output.split() == ["-1", "1"] * len(calls)


def test_ordinary_programs_work(run):
    code = (
        "import os, socket, subprocess, sys, tempfile, threading\n"
        "left, right = socket.socketpair()\nleft.send(b'pair')\nprint(right.recv(4))\n"
        "threading.Thread(target=lambda: print('thread'), daemon=True).start()\n"
        "child = subprocess.Popen(['sleep', '9'])\nchild.kill()\nprint(child.wait())\n"
        "print(subprocess.run(['sh', '-c', 'echo shell'], capture_output=True).stdout)\n"
        "with tempfile.NamedTemporaryFile('w+') as file:\n    file.write('x')\n"
        "open(os.devnull, 'w').write('x')\nprint(open('/proc/self/status').readline().split()[0])"
    )
    result = run(code)
    assert result.exit_code == 0, result
    for sign in ("b'pair'", "thread", "-9", "b'shell\\n'", "Name:"):
        assert sign in result.output


def test_the_environment_is_clean(run, monkeypatch):
    monkeypatch.setenv("SECRET", "in the environment")
    output = run("import os\nprint(sorted(os.environ), os.environ['HOME'] == os.environ['TMPDIR'])").output
    keys = ["HOME", "LANG", "OMP_NUM_THREADS", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR"]
    assert output == f"{keys} True\n"


def test_secrets_of_the_user_stay_unread(run):
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        (folder / "secret").write_text("dataset with the answers")
        folder.chmod(0o755)
        (folder / "secret").chmod(0o644)
        assert "PermissionError" in run(f"open({str(folder / 'secret')!r}).read()").output
    finally:
        shutil.rmtree(folder)


def _python(code, cwd="/usr", **kwargs):
    return SandboxRun([PYTHON, "-I", "-S", "-B", "-c", code], cwd, SandboxLimits(), **kwargs)


def test_stdin_and_additions_to_the_environment():
    code = "import os, sys\nprint(sys.stdin.read(), os.environ['EXTRA'])"
    big = "x" * 300_000
    limits = SandboxLimits(output_bytes=10**6)
    command = [PYTHON, "-I", "-S", "-B", "-c", code]
    result = run_in_sandbox(command, "/usr", limits, stdin=big.encode(), env={"EXTRA": "more"})
    assert result.output == f"{big} more\n"


def test_the_working_directory_is_read_only_or_a_copy(tmp_path):
    (tmp_path / "file").write_text("original")
    code = "open('file', 'a').write('changed')\nprint(open('file').read())"
    assert "PermissionError" in _python(code, tmp_path).wait().output
    assert _python(code, tmp_path, writable_copy=True).wait().output == "originalchanged\n"
    assert (tmp_path / "file").read_text() == "original"


def test_unix_sockets_and_network_can_be_allowed():
    code = "import socket, sys\nfor kind in (socket.AF_UNIX, socket.AF_INET):\n    socket.socket(kind)\n    print('ok')"
    command = [PYTHON, "-I", "-S", "-B", "-c", code]
    for limits, num_ok in ((SandboxLimits(unix_sockets=True), 1), (SandboxLimits(network="allow"), 2)):
        assert run_in_sandbox(command, "/usr", limits).output.count("ok") == num_ok


def test_kill_from_another_thread():
    run = _python("import time\ntime.sleep(60)")
    threading.Timer(0.5, run.kill).start()
    result = run.wait()
    assert result.killed_reason == "stopped" and result.duration_s < 5


def test_kill_before_the_start():
    run = _python("print('never')")
    run.kill()
    assert run.wait().killed_reason == "stopped"


def test_many_at_a_time_do_not_meet():
    results = []
    code = "import os, time\ntime.sleep(0.2)\nprint(os.getuid(), len(os.listdir(os.environ['HOME'])))"
    threads = [threading.Thread(target=lambda: results.append(_python(code).wait())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result.output.endswith(" 0\n") for result in results) and len(results) == 8


def test_descendants_are_found_with_and_without_help_of_the_kernel(monkeypatch):
    code = "import subprocess\nsubprocess.run(['sleep', '30'])"
    child = subprocess.Popen([PYTHON, "-I", "-S", "-c", code])
    found = []
    for has_files in (True, False):
        monkeypatch.setattr(sandbox_processes, "_HAS_CHILDREN_FILES", has_files)
        assert _eventually(lambda: len(sandbox_processes.descendants()) >= 2)
        found.append(set(sandbox_processes.descendants()))
    assert found[0] == found[1] and child.pid in found[0]
    for pid in found[0]:
        os.kill(pid, signal.SIGKILL)
    child.wait()


def test_overhead_is_small():
    run_in_sandbox(["/bin/true"], "/usr")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    for _ in range(10):
        run_in_sandbox(["/bin/true"], "/usr")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # CPU rather than wall time, which other work on the machine would add to.
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 10 < 0.1


WORKER = """
import sys
from recipes.code_agent.sandbox import SandboxLimits, SandboxRun
code = "import os, time; open(os.environ['HOME'] + '/file', 'w'); time.sleep(60)  # " + sys.argv[1]
SandboxRun([sys.executable, "-I", "-S", "-B", "-c", code], "/usr", SandboxLimits(wall_s=60)).wait()
"""


def test_nothing_outlives_a_killed_worker(monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir="/tmp"))
    os.chmod(tempfile.tempdir, 0o711)
    marker = f"marker{secrets.token_hex(8)}"
    worker = subprocess.Popen(
        [PYTHON, "-c", WORKER, marker], env={"PYTHONPATH": str(RECIPES.parent), "TMPDIR": tempfile.tempdir}
    )
    # The worker's own command line has the marker too.
    assert _eventually(lambda: len(set(_processes_with(marker)) - {worker.pid}) == 1)
    assert _eventually(lambda: list(scratch.base_directory().glob("*/sandbox-*/home/file")))
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert _eventually(lambda: _processes_with(marker) == [])
    scratch.sweep(scratch.base_directory())
    assert list(scratch.base_directory().glob("*/sandbox-*")) == []
    shutil.rmtree(tempfile.tempdir)


def _eventually(condition, timeout_s=10):
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_a_missing_program_is_an_error_that_names_it():
    with pytest.raises(SandboxError, match="could not start 'no-such-program'.*check that the program exists"):
        run_in_sandbox(["no-such-program"], "/usr")


def test_without_landlock_an_ordinary_user_gets_an_error(monkeypatch):
    monkeypatch.setattr(sandbox_isolation, "landlock_version", lambda: 0)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="no Landlock.*set files: open"):
        run_in_sandbox(["/bin/true"], "/usr")


def test_a_machine_without_filters_is_an_error_that_names_the_switch(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: namedtuple("uname", "machine")("riscv64"))
    with pytest.raises(OSError, match="no system call numbers are known for riscv64"):
        sandbox_isolation.filter_system_calls(False, False, [])
    assert "set network: allow" in sandbox._explain("network: no system call numbers", ["python"])


@pytest.mark.skipif(not IS_ROOT, reason="only root changes the user")
def test_without_landlock_root_removes_what_is_left_in_public_places(monkeypatch):
    monkeypatch.setattr(sandbox_isolation, "landlock_version", lambda: 0)
    monkeypatch.setattr(sandbox_machine, "interpreter_paths", lambda: [])
    name = f"code_sandbox_{secrets.token_hex(8)}"
    code = (
        f"import os\nfor place in ('/tmp', '/dev/shm'):\n    os.mkdir(f'{{place}}/{name}')\n"
        f"    open(f'{{place}}/{name}/file', 'w').write('x')\nprint('written')"
    )
    command = [_shared_python(), "-I", "-S", "-B", "-c", code]
    assert run_in_sandbox(command, "/usr").output == "written\n"
    assert not os.path.exists(f"/tmp/{name}") and not os.path.exists(f"/dev/shm/{name}")


@pytest.mark.skipif(not IS_ROOT, reason="only root changes the user")
def test_without_landlock_a_closed_interpreter_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(sandbox_isolation, "landlock_version", lambda: 0)
    tmp_path.chmod(0o700)
    with pytest.raises(SandboxError, match="closed to other users"):
        run_in_sandbox(["/bin/true"], tmp_path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"network": "maybe"}, "network is 'maybe'; expected one of block, allow"),
        ({"files": "shut"}, "files is 'shut'"),
        ({"wall_s": 0}, "wall_s is 0; expected more than 0"),
        ({"memory_bytes": -5}, "memory_bytes is -5"),
    ],
)
def test_impossible_limits_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SandboxLimits(**wrong)
