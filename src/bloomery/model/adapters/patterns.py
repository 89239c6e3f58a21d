"""Which modules the regular expressions of an adapter's rank_pattern and alpha_pattern mean, by PEFT's rule. No torch.

An adapter is a download, and a regular expression can run for ever: only a short one without groups is matched in this
process.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from bloomery.core.errors import UserError

PATTERN_SECONDS = 10.0
LONGEST_PATTERN = 1000
# PEFT 0.21, utils/other.py, get_pattern_key: the first key that is the whole name, or its end from a dot on.
RULE = r"(.*\.)?({pattern})$"
PROGRAM = """
import json, re, sys
names, patterns = json.load(sys.stdin)
json.dump([[bool(re.match(pattern, name)) for pattern in patterns] for name in names], sys.stdout)
"""


def first_matches(
    patterns: Sequence[str], names: Sequence[str], *, where: str
) -> dict[str, str | None]:
    """The first pattern that means each name, or None.

    Raises UserError for a text that is no regular expression, and for one that does not end.
    """
    expressions = [RULE.format(pattern=pattern) for pattern in patterns]
    for pattern, expression in zip(patterns, expressions, strict=True):
        if len(pattern) > LONGEST_PATTERN:
            problem = f"{pattern[:60]!r}... is longer than {LONGEST_PATTERN} characters"
            raise _refused(problem, where)
        try:
            re.compile(expression)
        except re.error as error:
            problem = f"{pattern[:60]!r} is no regular expression: {error}"
            raise _refused(problem, where) from error

    if all(map(_is_short, patterns)):
        matches = [[bool(re.match(text, name)) for text in expressions] for name in names]
    else:
        matches = _matched_elsewhere(expressions, names, where)
    return {
        name: next((pattern for pattern, hit in zip(patterns, row, strict=True) if hit), None)
        for name, row in zip(names, matches, strict=True)
    }


def _is_short(pattern: str) -> bool:
    """Whether a regular expression cannot run for long: it has no groups and few repeats."""
    num_repeats = sum(map(pattern.count, "*+?"))
    return len(pattern) <= 200 and num_repeats <= 4 and not re.search(r"[(){}]", pattern)


def _matched_elsewhere(
    expressions: Sequence[str], names: Sequence[str], where: str
) -> list[list[bool]]:
    """Matched in a process that is killed when it takes too long: the module `re` itself cannot be stopped."""
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", PROGRAM],
            input=json.dumps([names, expressions]).encode(),
            capture_output=True,
            timeout=PATTERN_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        problem = f"its patterns take longer than {PATTERN_SECONDS:.0f} seconds to match"
        raise _refused(problem, where) from error
    rows: list[list[bool]] = json.loads(answer.stdout)
    return rows


def _refused(problem: str, where: str) -> UserError:
    return UserError(
        problem, where=where, fix="name the modules in full, as model.layers.0.self_attn.q_proj"
    )
