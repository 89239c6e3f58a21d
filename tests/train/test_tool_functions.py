"""Tools and environments in a process of their own: what a model is told of them, and what hostile ones do."""

import time
from pathlib import Path

import pytest

from bloomery.core.errors import UserError
from bloomery.core.units import MIB, Duration
from bloomery.data.chat.tools import ToolCall
from bloomery.plan.types import EpisodesPlan
from bloomery.recipe.episodes import EnvironmentSection, Tool
from bloomery.train.rl.tool_functions import MOST_CHARACTERS, called, schema_of
from bloomery.train.rl.tools import RecordedCalls, ToolResult, Tools

FILE = '''
import os, random, socket, subprocess, sys, time
from typing import Literal, Optional


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first number,
            which may be negative
        b: the second
    """
    return a + b


def search(words: list[str], order: Literal["new", "old"] = "new", limit: Optional[int] = None) -> dict:
    """Search documents.

    Args:
        words: what to look for
        order: which come first
        limit: how many at most

    Returns:
        the documents
    """
    return {"words": words, "order": order}


def fail(text: str):
    """Fail.

    Args:
        text: why
    """
    raise RuntimeError(text)


def hang():
    """Hang."""
    time.sleep(60)


def flood_text():
    """Return much."""
    return "x" * 10_000_000


def flood_memory():
    """Take memory."""
    return str(len(bytearray(4 * 2**30)))


def end():
    """End the process."""
    os._exit(3)


def fork(path: str):
    """Leave a process behind, in a session of its own.

    Args:
        path: where it writes its number
    """
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            open(path, "w").write(str(os.getpid()))
            time.sleep(60)
        os._exit(0)
    return "forked"


def reach(address: str):
    """Open a connection.

    Args:
        address: where
    """
    socket.create_connection((address, 80), timeout=1)


def draw():
    """Draw a number."""
    return random.random()


class Counter:
    def __init__(self):
        self.count = None

    def reset(self, start, **row):
        self.count = start
        return f" Begin at {start}."

    def step(self, by: int) -> str:
        """Count.

        Args:
            by: how far
        """
        self.count += by
        return f"at {self.count}"

    def _hidden(self):
        pass

    def get_reward(self):
        return self.count / 10


class OnlyOnce:
    """The first one shows what a model is told; that of an episode fails, as one whose port is taken does."""

    made = 0

    def __init__(self):
        type(self).made += 1
        if self.made > 1:
            raise OSError("the port is taken")

    def reset(self, **row):
        return None

    def step(self, by: int):
        """Count."""


class NoReset:
    def step(self, by: int):
        """Count."""


class NoTools:
    def reset(self, **row):
        return None
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "user_tools.py"
    path.write_text(FILE)
    return path


# Of a tool that hangs: the others answer within that, also on a crowded machine.
SHORT = Duration(4.0, "seconds")


def plan(file: Path, *tools: str, environment: str | None = None, **limits) -> EpisodesPlan:
    """With as much time as a crowded machine may need, where no tool hangs."""
    return EpisodesPlan(
        tools=tuple(Tool(python=f"{file}:{tool}") for tool in tools),
        environment=EnvironmentSection(
            python=environment and f"{file}:{environment}",
            **{"timeout": Duration(60.0, "seconds"), **limits},
        ),
        max_turns=4,
    )


def call(name: str, arguments: str = "{}") -> ToolCall:
    return ToolCall(name, arguments, "call_0")


def of_file(file: Path) -> dict:
    namespace: dict = {}
    exec(compile(file.read_text(), str(file), "exec"), namespace)
    return namespace


@pytest.mark.parametrize("name", ["add", "search", "fail", "hang"])
def test_templates_are_told_what_transformers_tells_them(file, name):
    get_json_schema = pytest.importorskip("transformers.utils").get_json_schema
    function = of_file(file)[name]
    theirs = get_json_schema(function)["function"]
    ours = schema_of(name, function)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    properties = ours["parameters"].get("properties", {})
    their_properties = theirs["parameters"]["properties"]
    assert properties.keys() == their_properties.keys()
    assert ours["parameters"].get("required", []) == theirs["parameters"].get("required", [])
    for argument, of_argument in their_properties.items():
        assert properties[argument]["description"].split() == of_argument["description"].split()
        if not of_argument.get("nullable"):  # JSON schema has no such word: anyOf with null
            assert properties[argument]["type"] == of_argument["type"]
            assert properties[argument].get("enum") == of_argument.get("enum")


CALLS = {
    ("add", '{"a": 1}'): ("3", False),
    ("add", '{"a": "4", "b": -1}'): ("3", False),
    ("add", '{"a": "four"}'): ("a: Input should be a valid integer", True),
    ("add", "{}"): ("a: Missing required argument", True),
    ("add", '{"a": 1, "c": 2}'): ("c: Unexpected keyword argument", True),
    ("add", '{"a": 1'): ("the arguments are no JSON", True),
    ("add", "[1]"): ("the arguments are no JSON", True),
    ("sub", "{}"): ("there is no tool 'sub'; there are: add, fail", True),
    ("fail", '{"text": "so it is"}'): ("RuntimeError: so it is", True),
}


@pytest.mark.parametrize("written", CALLS)
def test_a_call_gives_text_or_what_is_wrong(file, written):
    functions = {name: of_file(file)[name] for name in ("add", "fail")}
    text, failed = called(functions, *written)
    expected, is_error = CALLS[written]
    assert failed == is_error and (expected in text if is_error else text == expected)
    assert not is_error or text.startswith('{"error": ')


def test_an_environment_that_cannot_be_made_again_says_why(file):
    with (
        Tools(plan(file, environment="OnlyOnce")) as tools,
        pytest.raises(UserError, match="cannot be made: OSError: the port is taken") as refused,
    ):
        tools.reset({0: (1, {})})
    assert "__init__" in refused.value.fix


def test_hostile_tools_end_their_own_episode_alone(file, tmp_path):
    names = ["add", "hang", "flood_text", "flood_memory", "end", "fork"]
    left = tmp_path / "left"
    begun = time.monotonic()
    with Tools(plan(file, *names, memory=256 * MIB, timeout=SHORT)) as tools:
        tools.reset({number: (number, {}) for number in range(7)})
        results = tools.call(
            {
                0: [call("add", '{"a": 40}')],
                1: [call("hang"), call("add", '{"a": 1}')],
                2: [call("flood_text")],
                3: [call("flood_memory")],
                4: [call("end"), call("add", '{"a": 5}')],
                5: [call("fork", f'{{"path": "{left}"}}')],
            }
        )
        texts = {number: [result.text for result in of] for number, of in results.items()}
        assert texts[0] == ["42"]
        assert "it took longer than 4 s" in texts[1][0] and texts[1][1] == "3"
        assert texts[2][0].startswith("x" * MOST_CHARACTERS) and "10,000,000" in texts[2][0]
        assert "MemoryError" in texts[3][0]
        assert "ended its process" in texts[4][0] and texts[4][1] == "7"
        assert texts[5] == ["forked"]
        failed = {number: [result.failed for result in of] for number, of in results.items()}
        assert failed == {0: [0], 1: [1, 0], 2: [0], 3: [1], 4: [1, 0], 5: [0]}
        # The others go on as if nothing had been.
        assert tools.call({6: [call("add", '{"a": 6}')]})[6] == [ToolResult("8", False)]
        deadline = time.monotonic() + 10
        while not (left.is_file() and left.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        process = int(left.read_text())
        assert Path(f"/proc/{process}").exists()
        tools.forget(range(7))
        deadline = time.monotonic() + 10
        while _runs(process) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not _runs(process), "no process is left"
    assert time.monotonic() - begun < 40


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_environment_has_a_state_for_each_episode(file):
    with Tools(plan(file, "hang", environment="Counter", timeout=SHORT)) as tools:
        assert tools.has_reward
        assert [schema["function"]["name"] for schema in tools.schemas] == ["hang", "step"]
        texts = tools.reset({3: (1, {"start": 3, "x": 0}), 5: (2, {"start": 5, "x": 0})})
        assert texts == {3: " Begin at 3.", 5: " Begin at 5."}
        results = tools.call(
            {
                3: [call("step", '{"by": 2}'), call("step", '{"by": 2}')],
                5: [call("hang"), call("step", '{"by": 1}')],
            }
        )
        assert [result.text for result in results[3]] == ["at 5", "at 7"]
        assert "the environment is gone" in results[5][1].text
        assert tools.rewards([3, 5]) == [0.7, None]


def test_a_seed_is_that_of_the_episode(file):
    drawn = []
    for _ in range(2):
        with Tools(plan(file, "draw")) as tools:
            tools.reset({0: (7, {}), 1: (8, {})})
            drawn.append(
                [
                    results[0].text
                    for results in tools.call({0: [call("draw")], 1: [call("draw")]}).values()
                ]
            )
    assert drawn[0] == drawn[1] and drawn[0][0] != drawn[0][1]


@pytest.mark.parametrize("network", [False, True])
def test_tools_reach_no_other_machine_unless_the_recipe_says_so(file, network):
    with Tools(plan(file, "reach", network=network)) as tools:
        tools.reset({0: (0, {})})
        (result,) = tools.call({0: [call("reach", '{"address": "127.0.0.1"}')]})[0]
        if tools.notes:
            pytest.skip(tools.notes[0])
        # Nothing listens there: with a network the host answers so, without one there is none.
        assert ("refused" in result.text) == network
        assert ("unreachable" in result.text) != network


REFUSED = {
    "file": ("user_tools.py:nothing", None, "the tool nothing has no function nothing"),
    "untyped": ("other.py:untyped", None, "does not say the type of its argument x"),
    "undocumented": ("other.py:undocumented", None, "has no docstring"),
    "stars": ("other.py:stars", None, r"takes \*args"),
    "same name": ("other.py:step", "user_tools.py:Counter", "two tools have the name step"),
    "no reset": (None, "user_tools.py:NoReset", "has no method reset"),
    "no tools": (None, "user_tools.py:NoTools", "has no tool"),
    "broken": ("broken.py:f", None, "cannot be loaded: ZeroDivisionError"),
    "init": (None, "other.py:Needs", "cannot be made"),
}
OTHER = '''
def untyped(x):
    """Do."""
def undocumented(x: int):
    return x
def stars(*args: int):
    """Do."""
def step(by: int):
    """Do."""
class Needs:
    def __init__(self, key):
        self.key = key
    def reset(self, **row):
        return None
'''


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_model_cannot_be_told_of_is_said_before_training(file, case):
    tool, environment, reason = REFUSED[case]
    (file.parent / "other.py").write_text(OTHER)
    (file.parent / "broken.py").write_text("1 / 0")
    given = EpisodesPlan(
        tools=() if tool is None else (Tool(python=str(file.parent / tool)),),
        environment=EnvironmentSection(
            python=None if environment is None else str(file.parent / environment)
        ),
        max_turns=2,
    )
    with Tools(given) as tools, pytest.raises(UserError, match=reason) as refused:
        tools.start()
    assert refused.value.fix


def test_what_was_answered_before_a_kill_is_read_again(tmp_path):
    files = (tmp_path / "tools", "step-00000001")
    asked = call("add", '{"a": 1}')
    RecordedCalls(*files).add([(2**63, 1, 0, asked, ToolResult("3", False))])
    with (tmp_path / "tools" / "step-00000001-rank-0.jsonl").open("ab") as torn:
        torn.write(b'[9223372036854775808, 1, 1, "ad')
    again = RecordedCalls(*files)
    assert again.answer(2**63, 1, 0, asked) == ToolResult("3", False)
    assert again.answer(2**63, 1, 0, call("add", '{"a": 2}')) is None
    again.add([(2**63, 1, 1, asked, ToolResult("4", True))])
    assert RecordedCalls(*files).answer(2**63, 1, 1, asked) == ToolResult("4", True)
