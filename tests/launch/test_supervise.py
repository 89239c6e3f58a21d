"""A child's death in one sentence."""

import signal
from pathlib import Path

import pytest

from bloomery.launch.run_folder import RunFolder
from bloomery.launch.supervise import Ending, failure

FOLDER = RunFolder(Path("/somewhere/runs/one"))


def told(code: int, *tail: str, report: dict | None = None, stage: str = "train") -> str:
    return str(failure(Ending(stage, code, report, tail), FOLDER, step=7))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (-signal.SIGKILL, "killed from outside after step 7 (SIGKILL)"),
        (-signal.SIGSEGV, "died after step 7 of SIGSEGV, inside a library or a driver"),
        (-signal.SIGABRT, "SIGABRT"),
        (-63, "signal 63"),
    ],
)
def test_signals_are_named(code: int, said: str) -> None:
    assert said in told(code, "some noise")
    assert "bloomery resume /somewhere/runs/one" in told(code)


def test_of_a_traceback_the_exception_is_told() -> None:
    tail = ("Traceback (most recent call last):", '  File "x.py", line 3', "    boom()", "RuntimeError: no such op", "")
    assert "training failed after step 7: RuntimeError: no such op" in told(1, *tail)
    assert "/somewhere/runs/one/log.txt" in told(1, *tail)
    dotted = ("Traceback", "torch._inductor.exc.InductorError: CppCompileError: it broke", "", "Set X=1 for more")
    assert "InductorError: CppCompileError: it broke" in told(1, *dotted)


def test_without_a_word_it_says_so() -> None:
    assert "nothing was said" in told(3)


def test_a_reported_error_is_passed_on_as_it_is() -> None:
    report = {"problem": "the corpus is empty", "where": "data.path", "remedy": "add text", "code": 1}
    assert told(1, report=report, stage="prepare") == "error: the corpus is empty\nwhere: data.path\nmend:  add text"
