"""Whether programs of completions pass the tests of their rows, each in a sandbox. No torch."""

import ast
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from bloomery.core.sandbox.programs import Limits, program_of, run_program

NO_ENTRY_POINT = "None"  # asserts name what they call
MOST_AT_ONCE = 16


@dataclass(frozen=True)
class ProgramTest:
    """`code` defines check(candidate), and `entry_point` is the candidate's name in the program.

    `prompt`: the beginning of the program, which the completion continues; None of a conversation, whose answer has
    the program in a code block. `banned`: modules that the program cannot import.
    """

    code: str
    entry_point: str
    prompt: str | None
    banned: tuple[str, ...] = ()


def program_test(prompt: Any, test: Any, row: Mapping[str, Any]) -> ProgramTest:
    """The test of a row: check(candidate) and the row's `entry_point` as in HumanEval, or asserts as in MBPP.

    Raises ValueError for another, with what is wrong.
    """
    beginning = prompt if isinstance(prompt, str) else None
    banned = row.get("banned") or []
    if not isinstance(banned, list) or not all(isinstance(name, str) for name in banned):
        raise ValueError("the column banned is no list of modules")
    lines = test if isinstance(test, list) else [test]
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("the test is neither a text nor a list of texts")
    code = "\n".join(lines)
    try:
        tree = ast.parse(code)
    except SyntaxError as error:
        raise ValueError(f"the test is no Python: {error.msg}, line {error.lineno}") from error
    entry_point = row.get("entry_point") or NO_ENTRY_POINT
    if not isinstance(entry_point, str):
        raise ValueError("the column entry_point is no text")
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if "check" in names:
        if entry_point == NO_ENTRY_POINT:
            raise ValueError("a test with check(candidate) needs the column entry_point")
        return ProgramTest(code, entry_point, beginning, tuple(banned))
    if not tree.body:
        raise ValueError("the test is empty")

    # Asserts are run in a function, so that they find the names of the program.
    function = ast.parse("def check(candidate): pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    function.body = tree.body
    return ProgramTest(ast.unparse(function), entry_point, beginning, tuple(banned))


def passing(
    completions: Sequence[str], tests: Sequence[ProgramTest], *, cpu_seconds: float, memory: int
) -> list[bool]:
    """Whether the program of each completion passes its test. A program that was seen before is not run again.

    Raises UserError where this system offers no sandbox.
    """
    # A program that waits takes no processor time: it is ended after twice the time that it may compute.
    limits = Limits(
        seconds=2 * cpu_seconds, cpu_seconds=math.ceil(cpu_seconds), memory_bytes=memory
    )

    def passes(completion: str, test: ProgramTest) -> bool:
        program = program_of(
            completion,
            prompt=test.prompt or "",
            entry_point=test.entry_point,
            chat=test.prompt is None,
        )
        failure = run_program(
            program,
            test=test.code,
            entry_point=test.entry_point,
            prompt=test.prompt or "",
            banned=test.banned,
            limits=limits,
            where="rewards, unit_tests",
        )
        return failure is None

    pairs = list(zip(completions, tests, strict=True))
    different_pairs = list(dict.fromkeys(pairs))
    with ThreadPoolExecutor(programs_at_once()) as pool:
        results = dict(
            zip(different_pairs, pool.map(lambda pair: passes(*pair), different_pairs), strict=True)
        )
    return [results[pair] for pair in pairs]


def programs_at_once() -> int:
    """One a processor of this process: more would take each other's time."""
    return min(MOST_AT_ONCE, len(os.sched_getaffinity(0)))


def longest_seconds(num_programs: int, cpu_seconds: float) -> float:
    """How long `passing` takes when every program is ended at its limit, with its start."""
    return math.ceil(num_programs / programs_at_once()) * (2 * cpu_seconds + 1.0)
