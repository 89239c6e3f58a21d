"""Rewards that need no code of the user's: whether a completion has the right answer or form. Does not import torch."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

from bloomery.core.errors import UserError
from bloomery.infer.grammar_trials import BYTES, GrammarTrials
from bloomery.train.rl.json_answers import follow_schema
from bloomery.train.rl.program_answers import ProgramTest, passing, program_test

Verifier = Callable[..., "list[Score]"]
SOFT_OVERLONG = "soft_overlong"  # the verifier that reads the ids of completions
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")


def content_text(completion: Any) -> str:
    """The text of a completion: of messages, that of the last one."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content") if completion else ""
    return content if isinstance(content, str) else ""


def exact_match(completion: str, expected: Any, _settings: Mapping[str, Any]) -> float:
    """1 where the completion is the expected text, but for space around it."""
    return float(completion.strip() == str(expected).strip())


def math_answer(completion: str, expected: Any, _settings: Mapping[str, Any]) -> float:
    r"""1 where the answer has the expected value: what \boxed{} holds, else the last number of the completion."""
    boxed = BOXED.findall(completion)
    numbers = NUMBER.findall(completion)
    answer = boxed[-1] if boxed else numbers[-1] if numbers else ""
    expected_numbers = NUMBER.findall(str(expected))
    if not expected_numbers:
        return float(answer.strip() == str(expected).strip())
    value = number_of(answer)
    return float(value is not None and value == number_of(expected_numbers[-1]))


def number_of(text: str) -> Fraction | None:
    """An exact number of digits, a decimal or a fraction; None for anything else."""
    try:
        return Fraction(text.strip().strip("$").replace(",", ""))
    except (ValueError, ZeroDivisionError):
        return None


def matches(completion: str, expected: Any, settings: Mapping[str, Any]) -> float:
    """1 where the pattern is found; with a column, where its first group is what the column holds."""
    match = re.search(settings["pattern"], completion, re.DOTALL)
    if match is None:
        return 0.0
    if expected is None:
        return 1.0
    group = match[1] if match.groups() else match[0]
    return float(group.strip() == str(expected).strip())


def short_enough(completion: str, expected: Any, settings: Mapping[str, Any]) -> float:
    """1 up to so many characters, falling to 0 at twice as many. The column, where there is one, has the number."""
    longest = float(settings["max_characters"] if expected is None else expected)
    return max(0.0, min(1.0, 2.0 - len(completion) / longest))


def overlong(num_tokens: int, settings: Mapping[str, Any]) -> float:
    """0 up to L - c tokens, then falling to -1 at L = `max_completion_len`, with c = `soft_punish_cache`.

    Eq. 13 of DAPO (arXiv:2503.14476).
    """
    cache: int = settings["soft_punish_cache"]
    longest: int = settings["max_completion_len"]
    excess = num_tokens - (longest - cache)
    return -max(0.0, min(1.0, excess / cache))


VERIFIERS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], float]] = {
    "exact_match": exact_match,
    "math": math_answer,
    "regex": matches,
    "length": short_enough,
}


@dataclass(frozen=True)
class Unscored:
    """In place of a number: why a completion got none."""

    problem: str


Score = float | None | Unscored


def verifier_of(name: str, settings: Mapping[str, Any]) -> Verifier:
    """A reward function. `settings["column"]`: the dataset's column with what is expected; a row without it, None."""
    score_together = {"json_schema": _score_json, "unit_tests": _score_programs}.get(name)
    column = settings.get("column")

    def reward(
        *, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[Score]:
        if name == SOFT_OVERLONG:
            return [overlong(len(ids), settings) for ids in columns["completion_ids"]]
        texts = [content_text(completion) for completion in completions]
        expected = [None] * len(texts) if column is None else columns[column]

        # Only rows that say what is right get a score.
        scores: list[Score] = [None] * len(texts)
        indices = [
            index for index, value in enumerate(expected) if column is None or value is not None
        ]
        if score_together is None:
            for index in indices:
                scores[index] = _score(VERIFIERS[name], texts[index], expected[index], settings)
            return scores
        rows = [{key: values[index] for key, values in columns.items()} for index in indices]
        scores_of_rows = score_together(
            [prompts[index] for index in indices],
            [texts[index] for index in indices],
            [expected[index] for index in indices],
            rows,
            settings,
        )
        for index, score in zip(indices, scores_of_rows, strict=True):
            scores[index] = score
        return scores

    return reward


def _score(
    verify: Callable[[str, Any, Mapping[str, Any]], float],
    text: str,
    expected: Any,
    settings: Mapping[str, Any],
) -> Score:
    try:
        return verify(text, expected, settings)
    except (ValueError, TypeError, ArithmeticError) as error:
        return Unscored(f"{settings['column']} is {str(expected)[:80]!r}: {error}")


def _score_json(
    _prompts: Sequence[Any],
    texts: Sequence[str],
    expected: Sequence[Any],
    _rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[Score]:
    """1 where the completion is JSON that follows the schema: that of the row, or of the settings."""
    schemas = [settings["json_schema"] if value is None else value for value in expected]
    # Each schema is compiled once, for all completions that have to follow it.
    indices_by_schema = dict[str, list[int]]()
    for index, schema in enumerate(schemas):
        text = schema if isinstance(schema, str) else json.dumps(schema)
        indices_by_schema.setdefault(text, []).append(index)
    scores: list[Score] = [None] * len(texts)
    for schema_text, indices in indices_by_schema.items():
        try:
            schema = json.loads(schema_text)
            if not isinstance(schema, dict):
                raise ValueError("a JSON schema is an object")
            follow = follow_schema(_grammars(), schema, [texts[index] for index in indices])
        except (ValueError, RecursionError) as error:
            follow = None
            problem = f"no JSON schema: {error}"
        except UserError as error:
            follow = None
            problem = error.problem
        for number, index in enumerate(indices):
            scores[index] = Unscored(problem) if follow is None else float(follow[number])
    return scores


@cache
def _grammars() -> GrammarTrials:
    """Of this process; its child ends with it."""
    return GrammarTrials(BYTES)


def _score_programs(
    prompts: Sequence[Any],
    texts: Sequence[str],
    expected: Sequence[Any],
    rows: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
) -> list[Score]:
    """1 where the program of the completion passes the row's test."""
    # 1. The tests that can run. A row without one keeps the reason.
    scores: list[Score] = [None] * len(texts)
    tests = dict[int, ProgramTest]()
    for index, (prompt, test, row) in enumerate(zip(prompts, expected, rows, strict=True)):
        try:
            tests[index] = program_test(prompt, test, row)
        except ValueError as error:
            scores[index] = Unscored(str(error))

    # 2. All programs side by side, each in a process of its own.
    passed = passing(
        [texts[index] for index in tests],
        list(tests.values()),
        cpu_seconds=settings["program_seconds"],
        memory=settings["program_memory"],
    )
    for index, has_passed in zip(tests, passed, strict=True):
        scores[index] = float(has_passed)
    return scores
