"""How the lines of a plan's page are set: their width, labels and columns, and figures next to a limit."""

import textwrap
from collections.abc import Iterator, Sequence

from bloomery.core.units import GIB, MIB, format_seconds
from bloomery.plan.types import RunPlan

WIDTH = 100
LABEL = 10
SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "bfloat16-pure": "bf16"}


def block(label: str, lines: Iterator[str] | Sequence[str]) -> list[str]:
    """Lines behind their label, which stands in the first."""
    return [f"{'' if i else label:<{LABEL}}{line}" for i, line in enumerate(lines)]


def joined(facts: Sequence[str]) -> list[str]:
    """Facts on one line, or on several where they are too long for it."""
    lines: list[str] = []
    for fact in facts:
        if lines and len(lines[-1]) + len(fact) + 3 <= WIDTH - LABEL:
            lines[-1] += f" · {fact}"
        else:
            lines += textwrap.wrap(
                fact, WIDTH - LABEL, subsequent_indent="  ", break_on_hyphens=False
            )
    return lines


def columns(head: str, text: str) -> Iterator[str]:
    """`head` and the text next to it, wrapped in the rest of the line."""
    first_line, *rest = textwrap.wrap(text, WIDTH - LABEL - len(head)) or [""]
    yield head + first_line
    yield from (" " * len(head) + line for line in rest)


def about(seconds: float) -> str:
    """ "5.9 days" -> "6 days": a headline has no decimals that mean nothing."""
    number, _, unit = format_seconds(seconds).partition(" ")
    if unit != "years" and float(number) >= 3:
        return f"{float(number):.0f} {unit}"
    return f"{number} {unit}".replace(".0 ", " ")


def unit_of(value: float) -> tuple[str, float]:
    return ("GiB", GIB) if value >= GIB else ("MiB", MIB)


def of_limit(value: float, plan: RunPlan) -> str:
    """ "9.0 of 11.0 GiB", with the value in the unit of the total, or "35.2 GiB of 46 MiB"."""
    (unit, size) = unit_of(plan.memory.total)
    (limit_unit, limit_size) = unit_of(plan.memory.limit)
    text = f"{value / size:.{1 if size == GIB else 0}f}" + (
        "" if limit_unit == unit else f" {unit}"
    )
    limit = f"{plan.memory.limit / limit_size:,.{1 if limit_size == GIB else 0}f}"
    return f"{text} of {limit} {limit_unit}"
