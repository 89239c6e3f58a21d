"""Programs as completions: which pass the tests of their rows, how long they may take, and what is left of them."""

import time

import psutil
import pytest

from bloomery.core.errors import UserError
from bloomery.core.sandbox.programs import refuse_without_sandbox
from bloomery.core.units import MIB
from bloomery.train.rl.program_answers import (
    longest_seconds,
    passing,
    program_test,
    programs_at_once,
)

CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n"
BEGINNING = "def double(x):\n"
CHAT = [{"role": "user", "content": "Write double(x)."}]


def offered():
    try:
        refuse_without_sandbox()
    except UserError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(offered()), reason=f"no sandbox here: {offered()}")


def passed(completions, test, **settings):
    return passing(
        completions,
        [test] * len(completions),
        cpu_seconds=settings.get("cpu_seconds", 5.0),
        memory=settings.get("memory", 256 * MIB),
    )


@needs_sandbox
def test_a_text_continues_its_prompt_and_an_answer_has_a_code_block():
    row = {"entry_point": "double"}
    continued = program_test(BEGINNING, CHECK, row)
    bodies = ["    return 2 * x", "    return x", "    return (", "    import os; os._exit(0)"]
    assert passed(bodies, continued) == [True, False, False, False]
    answered = program_test(CHAT, CHECK, row)
    block = "Here:\n```python\ndef double(x):\n    return x + x\n```\nDone."
    assert passed([block, "I cannot.", "def double(x): return 3 * x"], answered) == [
        True,
        False,
        False,
    ]


@needs_sandbox
@pytest.mark.parametrize(
    "test", ["assert double(2) == 4", ["assert double(2) == 4", "assert double('a') == 'aa'"]]
)
def test_asserts_name_what_they_call(test):
    right = "```python\ndef double(x):\n    return x + x\n```"
    wrong = "```python\ndef double(x):\n    return 5\n```"
    cheat = "```python\nclass A:\n    __eq__ = lambda *_: True\ndef double(x):\n    return A()\n```"
    assert passed([right, wrong, cheat], program_test(CHAT, test, {})) == [True, False, False]


@pytest.mark.parametrize(
    ("test", "row", "problem"),
    [
        ("assert (", {}, "the test is no Python"),
        ("", {}, "the test is empty"),
        (3, {}, "neither a text nor a list of texts"),
        (["assert 1", 2], {}, "neither a text nor a list of texts"),
        (CHECK, {}, "needs the column entry_point"),
        (CHECK, {"entry_point": 3}, "entry_point is no text"),
        (CHECK, {"entry_point": "f", "banned": "os"}, "banned is no list"),
    ],
)
def test_a_row_without_a_test_is_said(test, row, problem):
    with pytest.raises(ValueError, match=problem):
        program_test(BEGINNING, test, row)


@needs_sandbox
def test_endless_and_greedy_programs_end_and_the_others_pass():
    """Two programs on each core never end: all are over in the time that is allowed for them."""
    mark = "mark_of_test_program_answers"
    endless = [f"    {mark} = {number}\n    while True: pass" for number in range(2)]
    sleeping = [f"    import time; time.sleep({600 + number})" for number in range(2)]
    forking = ["    import os\n    while True: os.fork()"]
    greedy = ["    return len('x' * 2**30)"]
    right = ["    return 2 * x"] * 20  # alike: run once
    completions = [*endless, *sleeping, *forking, *greedy, *right]
    test = program_test(BEGINNING, CHECK, {"entry_point": "double"})
    start_time = time.monotonic()
    assert passed(completions, test, cpu_seconds=1.0) == [False] * 6 + [True] * 20
    assert time.monotonic() - start_time < longest_seconds(7, 1.0) + 20  # the machine is shared
    assert not [
        process
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and "sandboxed" in " ".join(process.cmdline())
    ]


def test_the_time_allowed_grows_with_the_programs():
    assert longest_seconds(0, 5.0) == 0
    assert longest_seconds(programs_at_once(), 5.0) == 11.0
    assert longest_seconds(4 * programs_at_once(), 5.0) == 44.0
