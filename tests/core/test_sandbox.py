"""Hostile programs in the sandbox: each ends in time, fails, and leaves nothing behind."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from bloomery.core.errors import UserError
from bloomery.core.sandbox import graded, programs, sandboxed
from bloomery.core.sandbox.programs import Limits, refuse_without_sandbox, run_program
from bloomery.core.units import MIB

SHORT = Limits(seconds=1.5, cpu_seconds=1)
DONE = "\ndef done():\n    return 'done'\n"


def run(program, limits=None, banned=()):
    """None when the program ends without an exception and its function can be called."""
    test = "def check(candidate):\n    assert candidate() == 'done'\n"
    return run_program(program + DONE, test=test, entry_point="done", banned=banned, limits=limits)


def offered():
    try:
        refuse_without_sandbox()
    except UserError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(offered()), reason=f"no sandbox here: {offered()}")


@pytest.fixture(autouse=True)
def folders(monkeypatch, tmp_path_factory):
    """Where this test's sandboxes have their folders, so that those of other tests are not in it."""
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is
    place = Path(tempfile.mkdtemp())
    place.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    place.rmdir()


def left_behind(mark):
    """Processes whose command line, folder or name has the mark; the mark is in each program of a test."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()) + process.name():
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_a_program_that_ends_passes_and_one_that_raises_fails():
    assert (
        run("import math, json, re, collections, itertools\nassert math.gcd(12, 18) == 6") is None
    )
    assert run("assert 1 == 2, 'no'") == "AssertionError: no"
    assert "SyntaxError" in run("def")
    assert "ModuleNotFoundError" in run("import statistics", banned=["statistics"])
    assert run("open('a.txt', 'w').write('x')\nassert open('/tmp/a.txt').read() == 'x'") is None
    assert (
        run("import os\nassert os.listdir('.') == [] and not os.environ.keys() - {'LC_CTYPE'}")
        is None
    )
    assert run("import sys\nassert not [p for p in sys.path if 'site-packages' in p]") is None


HOSTILE = {
    "fork bomb": "import os\nwhile True:\n    os.fork()",
    "10 GB": "a = bytearray(10 * 2**30)",
    "10 GB in pieces": "a = []\nwhile True:\n    a.append(bytearray(2**20))",
    "endless loop": "while True:\n    pass",
    "sleep": "import time\ntime.sleep(1000)",
    "ignores signals": "import signal, time\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)",
    "exits at once": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "huge output": "while True:\n    print('x' * 10**6)",
    "huge result": "import os\nfor fd in range(3, 32):\n    try:\n        while True: os.write(fd, b'x' * 10**6)\n"
    "    except OSError: pass",
    "huge file": "with open('a', 'wb') as f:\n    while True: f.write(bytes(10**6))",
    "many files": "for n in range(10**6):\n    open(str(n), 'w').close()",
    "many open files": "a = [open('/dev/null') for n in range(100)]",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', PORT), 1)",
    "datagram": "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "home": "import os\nassert [f for f in os.listdir(HOME) if os.path.isfile(HOME + '/' + f)]",
    "ssh keys": "print(open(HOME + '/.ssh/id_rsa').read())",
    "reads its source": "open(SECRET).read()",
    "writes outside": "open(SECRET, 'w').write('x')",
    "writes into Python": "import os\nopen(os.__file__, 'a').write('x')",
    "deletes": "import os\nos.unlink(SECRET)",
    "passwords": "open('/etc/passwd').read()",
    "processes": "import os\nassert os.listdir('/proc')",
    "kills all": "import os\nos.kill(-1, 9)",
    "kills its parent": "import os, time\nfor n in (9, 15, 19): os.kill(os.getppid(), n)\nos.kill(PID, 9)",
    "leaves the root": "import os\nos.chroot('.')",
    "mounts": "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "becomes root": "import os\nos.setuid(0)",
    "namespaces": "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000 | 0x20000) == 0\n"
    "assert ctypes.CDLL(None).mount(b'none', b'/lib', b'tmpfs', 0, None) == 0\nopen(SECRET)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "crash": "import ctypes\nctypes.string_at(0)",
    "a shell": "import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'], check=True)",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_ends_fails_and_leaves_nothing(name, tmp_path, folders):
    secret = tmp_path / "secret.txt"
    secret.write_text("untouched")
    names = f"HOME, SECRET, PORT, PID = {str(Path.home())!r}, {str(secret)!r}, 22, {os.getpid()}\n"
    began = time.monotonic()
    assert run(names + HOSTILE[name], limits=SHORT) is not None
    assert time.monotonic() - began < 15, "a busy machine starts a sandbox in a second"
    assert secret.read_text() == "untouched"
    assert not list(folders.iterdir())
    assert not [
        child
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "sandboxed.py" in str(child.cmdline())
    ]


TWICE = (
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('ab') == 'abab'\n"
)
CHEATS = {
    "names of the runner": "import __main__, os\nos.write(__main__.out, __main__.job['nonce'].encode())\nos._exit(0)",
    "every number in the frames": "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
    "    for value in [*frame.f_globals.values(), *frame.f_locals.values()]:\n"
    "        if type(value) is int and 0 < value < 64:\n"
    "            try: os.write(value, b'passed')\n            except OSError: pass\n"
    "    frame = frame.f_back\nos._exit(0)",
    "every file": "import os\nfor n in range(3, 64):\n    try: os.write(n, b'passed')\n"
    "    except OSError: pass\nos._exit(0)",
    "every file, and stays": "import os, time\nfor n in range(3, 64):\n    try: os.write(n, b'passed')\n"
    "    except OSError: pass\ntime.sleep(1)",
    "ends well": "import os\nos._exit(0)",
    "ends well when called": "import os\ndef f(x): os._exit(0)",
    "at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
    "replaces the process": "import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-S', '-c', 'pass'])",
    "a patched isinstance": "import builtins\nbuiltins.isinstance = lambda *a: True\ndef f(x): return 0",
    "no assertions": "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\n"
    "def f(x): return 0",
    "patched json": "import json\njson.dumps = lambda *a, **k: '{\"value\": 4}'\ndef f(x): return 0",
    "equals all": "class All:\n    def __eq__(self, other): return True\ndef f(x): return All()",
    "a number that equals all": "class All(int):\n    def __eq__(self, other): return True\n"
    "    def __index__(self): return self\ndef f(x): return All(5)",
    "a text that equals all": "class All(str):\n    def __eq__(self, other): return True\n"
    "    def __str__(self): return self\ndef f(x): return All('')",
    "answers for the channel": "import os, sys, __main__\ntalk = sys._getframe(2).f_locals.get('talk') or "
    "sys._getframe(1).f_locals['talk']\nwhile True: os.write(talk.writing, b'{\"value\": null}\\n')",
    "answers that are none": "import sys\ndef f(x): sys._getframe(2).f_locals['talk'].send([1]); return 4",
    "a verdict as an error": "def f(x):\n    raise Exception('passed')",
    "an error named as one": "class passed(BaseException): pass\ndef f(x):\n    raise passed('passed')",
    "looks into the grader": "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    "traced = [n for n in range(1, 40) if n != os.getpid() and libc.ptrace(16, n, 0, 0) == 0]\n"
    "def f(x): return x * 2 if traced else 0",
    "reads the grader": "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def reads(n):\n    class Part(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), ('size', ctypes.c_size_t)]\n"
    "    mine = ctypes.create_string_buffer(8)\n"
    "    here, there = Part(ctypes.addressof(mine), 8), Part(id(None), 8)\n"
    "    libc.process_vm_readv(n, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)\n"
    "    return ctypes.get_errno() not in (1, 3)\n"  # neither EPERM nor ESRCH
    "seen = [n for n in range(1, 40) if n != os.getpid() and reads(n)]\ndef f(x): return x * 2 if seen else 0",
    "kills the grader": "import os, signal\nfor n in range(1, 40):\n    if n != os.getpid():\n"
    "        try: os.kill(n, signal.SIGKILL)\n        except OSError: pass\ndef f(x): return x * 2",
    "a generator without end": "import itertools\ndef f(x): return itertools.count()",
    "a value that holds itself": "a = []\na.append(a)\ndef f(x): return a",
    "a value without bound": "def f(x): return 'x' * 10**8",
    "a number without bound": "def f(x): return 1 << 10**8",
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CHEATS)
def test_a_program_cannot_reach_its_verdict(name):
    assert run_program(CHEATS[name], test=TWICE, entry_point="f", limits=SHORT) is not None


def test_what_a_test_may_do_with_a_function():
    """Values there and back, changed arguments, exceptions, iterators, functions, classes, helpers of the prompt."""
    prompt = (
        "from fractions import Fraction\nimport datetime\n\nclass Odd(ValueError):\n    pass\n\n"
    )
    prompt += 'def inverse(text):\n    return text[::-1]\n\ndef f(x, key=None):\n    """Do."""\n'
    program = f"""{prompt}    if key: return [key(each) for each in x]
    if isinstance(x, str): raise Odd(x)
    if isinstance(x, list): x.append(1); return None
    if isinstance(x, dict): return x.pop('a')
    if isinstance(x, range): return (2 * each for each in x)
    if x is int: return lambda y: y + 1
    if x is set: return Box
    if x == 0: return [].pop()
    return x
class Box:
    def __init__(self, content): self.content = content
    def twice(self): return self.content * 2
"""
    test = """
def check(candidate):
    for value in (None, True, 2**70, -1.5, float("inf"), "\\ud800 é", b"\\xff", bytearray(b"a"), (1, (2,)), {1, 2},
                  frozenset("a"), 1j, Fraction(1, 3), datetime.date(2024, 2, 29), datetime.timedelta(days=1)):
        found = candidate(value) if not isinstance(value, str) else value
        assert found == value and type(found) is type(value), value
    values = [3]
    assert candidate(values) is None and values == [3, 1]
    values = {"a": [1], "b": 2}
    assert candidate(values) == [1] and values == {"b": 2}
    assert list(candidate(range(3))) == [0, 2, 4]
    assert candidate([1, 2], key=lambda x: -x) == [-1, -2] and candidate(["a"], key=len) == [1]
    assert candidate(int)(1) == 2 and candidate(set)((1,)).twice() == (1, 1) and candidate(set)(7).content == 7
    assert Box("a").twice() == "aa" and inverse("ab") == "ba"
    for kind, value in ((Odd, "x"), (IndexError, 0), (ZeroDivisionError, [1])):
        try:
            candidate(value, key=(lambda x: x // 0) if value == [1] else None)
        except kind as error:
            assert kind is not Odd or str(error) == "x"
        else:
            assert False, kind
"""
    assert run_program(program, test=test, entry_point="f", prompt=prompt) is None
    solution = "class Solution:\n    def f(self, x):\n        return x * 2\n"
    assert run_program(solution, test=TWICE, entry_point="Solution().f") is None
    assert "NameError" in run_program(solution, test=TWICE, entry_point="g")
    assert "SyntaxError" in run_program(
        solution, test=TWICE, entry_point="f); import os; os._exit(0"
    )


def test_a_daemon_ends_with_its_program():
    daemon = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        os.execv(sys.executable, [sys.executable, '-I', '-S', '-c',"
        " 'import time; time.sleep(600) # bloomery-daemon'])\n    os._exit(0)\n"
        "time.sleep(0.5)"
    )
    began = time.monotonic()
    assert run(daemon, limits=Limits(seconds=60)) is None  # the program itself ends well
    assert time.monotonic() - began < 60 and not left_behind("bloomery-daemon")
    assert run("import time\n" + daemon + "\ntime.sleep(600)", limits=SHORT) is not None
    assert not left_behind("bloomery-daemon")


def test_the_sandbox_ends_with_the_process_that_asked(tmp_path):
    code = (
        "from bloomery.core.sandbox.programs import Limits, run_program\n"
        'run_program(\'import time, sys\\nimport os\\nos.execv(sys.executable, [sys.executable, "-I", "-S", "-c", '
        "\"import time; time.sleep(600) # bloomery-orphan\"])', test='', entry_point='f', limits=Limits(seconds=500))"
    )
    asking = subprocess.Popen([sys.executable, "-c", code], env={**os.environ})
    try:
        until = time.monotonic() + 30
        while len(left_behind("bloomery-orphan")) < 2 and time.monotonic() < until:
            time.sleep(0.1)
        assert len(left_behind("bloomery-orphan")) > 1
    finally:
        asking.kill()
        asking.wait()
    until = time.monotonic() + 10
    while left_behind("bloomery-orphan") and time.monotonic() < until:
        time.sleep(0.1)
    assert not left_behind("bloomery-orphan")


def test_memory_of_files_and_processes_is_bounded():
    limits = Limits()
    assert limits.processes * limits.memory_bytes <= 4 * 2**30 and limits.folder_bytes <= 16 * MIB


def test_a_system_without_namespaces_is_refused(monkeypatch, tmp_path):
    """A kernel that refuses is played by a script whose unshare fails."""
    text = (
        Path(sandboxed.__file__).read_text().replace("_libc.unshare(", "_libc.unshare(-1 + 0 * ", 1)
    )
    (tmp_path / "sandboxed.py").write_text(text)
    monkeypatch.setattr(programs, "__file__", str(tmp_path / "programs.py"))
    with pytest.raises(UserError, match="no sandbox") as caught:
        run("x = 1")
    assert caught.value.where == "the sandbox" and "Invalid argument" in caught.value.problem


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(), reason="becomes another user"
)
def test_a_user_without_rights_has_the_same_sandbox(tmp_path):
    """With the system's Python, which every user can start."""
    tmp_path.chmod(0o755)
    script = tmp_path / "sandboxed.py"
    script.write_text(Path(sandboxed.__file__).read_text())
    (tmp_path / "root").mkdir(mode=0o777)
    (tmp_path / "root").chmod(0o777)
    for place in tmp_path.parents:
        if place.owner() == "root" and place != Path("/") and not place.stat().st_mode & 1:
            place.chmod(place.stat().st_mode | 0o011)
    code = f"""
import json, os, subprocess, sys, sysconfig
os.setgroups([]); os.setgid(12345); os.setuid(12345)
def run(program):
    python = os.path.realpath("/usr/bin/python3")
    job = dict(program=program + {DONE!r}, prompt="", test="def check(f): assert f() == 'done'", entry_point="done",
        banned=[], code={Path(graded.__file__).read_text()!r}, python=python,
        visible=[python, sysconfig.get_path("stdlib")],
        folder={str(tmp_path / "root")!r}, parent=os.getpid(), seconds=3.0, cpu_seconds=2, memory_bytes=2**28,
        processes=16, open_files=32, file_bytes=2**22, folder_bytes=2**24)
    command = [python, "-I", "-S", {str(script)!r}]
    return json.loads(subprocess.run(command, input=json.dumps(job).encode(), capture_output=True).stdout)
programs = ["x = 1", "open('/etc/passwd')", "import os\\nwhile True: os.fork()", "import os\\nos.chroot('.')",
            "import ctypes\\nassert ctypes.CDLL(None).mount(b'n', b'/tmp', b'tmpfs', 0, None) == 0", "while True: pass"]
print(json.dumps([run(one) for one in programs]))
"""
    found = subprocess.run(
        ["/usr/bin/python3", "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    answers = json.loads(found.stdout or "[]")
    assert len(answers) == 6, found.stderr
    if "refused" in answers[0]:
        pytest.skip(f"user namespaces are off: {answers[0]['refused']}")
    assert answers[0] == {"result": graded.PASSED}
    assert all(
        one.get("result") != graded.PASSED and "refused" not in one for one in answers[1:]
    ), answers
