"""Rewards that need no code of the user's: whether a completion has the right answer or form. Does not import torch."""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

Verifier = Callable[..., list[float | None]]
BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?|-?\.\d+")


def text_of(completion: Any) -> str:
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
    found = re.search(settings["pattern"], completion, re.DOTALL)
    if found is None:
        return 0.0
    if expected is None:
        return 1.0
    group = found[1] if found.groups() else found[0]
    return float(group.strip() == str(expected).strip())


def short_enough(completion: str, expected: Any, settings: Mapping[str, Any]) -> float:
    """1 up to so many characters, falling to 0 at twice as many. The column, where there is one, has the number."""
    longest = float(settings["max_characters"] if expected is None else expected)
    return max(0.0, min(1.0, 2.0 - len(completion) / longest))


VERIFIERS: Mapping[str, Callable[[str, Any, Mapping[str, Any]], float]] = {
    "exact_match": exact_match,
    "math": math_answer,
    "regex": matches,
    "length": short_enough,
}


def verifier_of(name: str, settings: Mapping[str, Any]) -> Verifier:
    """A reward function. `settings["column"]`: the dataset's column with what is expected; a row without it, None."""
    verify = VERIFIERS[name]
    column = settings.get("column")

    def reward(*, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if column is None:
            return [verify(text_of(completion), None, settings) for completion in completions]
        expected_values = columns[column]
        return [
            None if expected is None else verify(text_of(completion), expected, settings)
            for completion, expected in zip(completions, expected_values, strict=True)
        ]

    return reward
