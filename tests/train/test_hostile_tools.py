"""Tools that write where they should not, and environments whose rewards are no numbers."""

import json
import sys
from pathlib import Path

import psutil
import pytest
from test_tool_functions import SHORT, call, plan

from bloomery.core.errors import UserError
from bloomery.core.units import MIB
from bloomery.train.rl.tools import ToolResult, Tools

FILE = '''
import os, signal, stat, sys, time


def sockets():
    """All that this process has open."""
    found = []
    for descriptor in range(3, 200):
        try:
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                found.append(descriptor)
        except OSError:
            pass
    return found


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def answer_first(text: str):
    """Write an answer into every socket, as if it were the worker's."""
    for descriptor in sockets():
        os.write(descriptor, text.encode() + b"\\n")
    time.sleep(0.1)
    return "done"


def flood():
    """Write into every socket without end."""
    while True:
        for descriptor in sockets():
            os.write(descriptor, b"z" * 65536)


def close_all():
    """Close every descriptor."""
    os.closerange(0, 1000)


def raise_limit(program: bool):
    """Raise the limit of memory, here or in a program, and take 2 GiB."""
    import resource, subprocess, sys
    if program:
        done = subprocess.run([sys.executable, "-c", TAKE], capture_output=True, text=True)
        return done.stdout or done.stderr[-300:]
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(len(bytearray(2 * 2**30)))


TAKE = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(len(bytearray(2 * 2**30)))
"""


def litter():
    """Leave a process behind that starts others without end, each in a session of its own."""
    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            while True:
                if os.fork() == 0:
                    os.setsid()
                    time.sleep(60)
                time.sleep(0.01)
        os._exit(0)
    return "left"


def prints(newline: str):
    """Print without end."""
    while True:
        sys.stderr.write("z" * 100_000 + newline)
        sys.stdout.write("z" * 100_000 + newline)


def ignore():
    """Ignore signals."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(60)


def half():
    """Return half of a character."""
    return "a\\ud800b"


class Greeting:
    def reset(self, **row):
        return "b\\udfff"

    def step(self, by: int) -> int:
        """Step."""
        return by


class Rewarded:
    def reset(self, kind, **row):
        self.kind = kind

    def step(self, by: int) -> int:
        """Step."""
        return by

    def get_reward(self):
        return {"none": None, "text": "1.0", "nan": float("nan"), "list": [1.0], "one": True}[self.kind]
'''
WROTE = "the tool wrote into the connection of its process"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hostile.py"
    path.write_text(FILE)
    return path


FORGED = ['["forged", false]', "7", "[1, 7]", '[2, ["forged", false]]', "[" * 100_000, '[2, "ab"]']


def test_a_tool_that_writes_into_sockets_harms_its_own_episode_alone(file):
    with Tools(plan(file, "add", "answer_first", "flood", "close_all")) as tools:
        episodes = range(len(FORGED) + 3)
        tools.reset({number: (number, {}) for number in episodes})
        more = call("add", '{"a": 1, "b": 2}')
        calls = {
            number: [call("answer_first", json.dumps({"text": text})), more]
            for number, text in enumerate(FORGED)
        }
        calls[episodes[-3]] = [call("flood"), more]
        calls[episodes[-2]] = [call("close_all"), more]
        calls[episodes[-1]] = [more, more]
        results = tools.call(calls)
        told = {number: [result.text for result in of] for number, of in results.items()}
        assert told.pop(episodes[-1]) == ["3", "3"]
        assert "ended its process" in told.pop(episodes[-2])[0]
        for number, (first, then) in told.items():
            # A forged answer with the right number is what the tool's own code could return; where the tool's own
            # answer has come with it, they are no answer.
            assert WROTE in first or (number == 3 and first == "forged"), number
            assert then == "3" or WROTE in then, number
        # And nothing is left in any connection.
        again = tools.call({number: [more] for number in episodes})
        assert {result.text for of in again.values() for result in of} <= {"3"}


NO_REWARDS = {
    "none": "get_reward returned None, no number",
    "text": "get_reward returned '1.0', no number",
    "nan": "get_reward returned nan, no finite number",
    "list": "get_reward failed: TypeError",
}


@pytest.mark.parametrize("kind", [*NO_REWARDS, "one"])
def test_a_reward_is_a_number(file, kind):
    with Tools(plan(file, environment="Rewarded")) as tools:
        tools.reset({0: (0, {"kind": kind})})
        if kind == "one":
            assert tools.rewards([0]) == [1.0]
            return
        with pytest.raises(UserError, match=NO_REWARDS[kind]):
            tools.rewards([0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of Linux")
@pytest.mark.parametrize("program", [False, True])
def test_a_tool_cannot_raise_its_limit_of_memory(file, program):
    """Root could, which tests may run as."""
    with Tools(plan(file, "add", "raise_limit")) as tools:
        tools.reset({0: (0, {})})
        calls = [
            call("raise_limit", json.dumps({"program": program})),
            call("add", '{"a": 1, "b": 2}'),
        ]
        results = tools.call({0: calls})[0]
    assert str(2 * 2**30) not in results[0].text
    assert (
        "not allowed" in results[0].text
        or "exceed" in results[0].text
        or "memory" in results[0].text
    )
    assert results[1].text == "3"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="orphans are found in /proc")
def test_nothing_is_left_of_a_tool_that_starts_processes_without_end(file):
    others = set(psutil.Process().children())
    with Tools(plan(file, "add", "litter")) as tools:
        tools.reset({0: (0, {}), 1: (1, {})})
        litter, more = call("litter"), call("add", '{"a": 1, "b": 2}')
        results = tools.call({0: [litter, more], 1: [more]})
        assert [result.text for result in results[0]] == ["left", "3"]
        tools.forget([0, 1])
        (worker,) = set(psutil.Process().children()) - others
        assert worker.children(recursive=True) == []
        tools.reset({2: (2, {})})
        assert [result.text for result in tools.call({2: [more]})[2]] == ["3"]


@pytest.mark.parametrize(
    "hostile",
    [
        call("prints", '{"newline": "\\n"}'),
        call("prints", '{"newline": ""}'),
        call("ignore"),
    ],
    ids=["lines", "one line", "signals"],
)
def test_a_tool_that_prints_or_waits_without_end_is_cut(file, hostile):
    with Tools(plan(file, "add", "prints", "ignore", timeout=SHORT)) as tools:
        tools.reset({0: (0, {}), 1: (1, {})})
        more = call("add", '{"a": 1, "b": 2}')
        before = psutil.Process().memory_info().rss
        results = tools.call({0: [hostile, more], 1: [more]})
        assert "longer than 4 s" in results[0][0].text
        assert results[0][1].text == results[1][0].text == "3"
        assert psutil.Process().memory_info().rss - before < 64 * MIB


def test_a_result_that_is_no_unicode_is_told_with_a_replacement(file):
    """A model may write half of a surrogate pair into the arguments of a tool that answers with them."""
    with Tools(plan(file, "half", environment="Greeting")) as tools:
        assert tools.reset({0: (0, {})}) == {0: "b\ufffd"}
        assert tools.call({0: [call("half")]})[0] == [ToolResult("a\ufffdb", False)]
