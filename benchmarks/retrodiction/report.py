"""Writes docs/explanation/plan-accuracy.md: `python benchmarks/retrodiction/report.py`."""

import sys
import textwrap
from collections.abc import Iterator
from statistics import median
from typing import Any

from ask import HERE, Answer, answers, table
from fitted import blind_speed, family_of, fitted, rows

PAGE = HERE.parents[1] / "docs/explanation/plan-accuracy.md"
INSIDE = 0.80  # of the figures
ERROR = {"speed": 0.15, "memory": 0.08}  # at the median

INTRO = """
Others trained on GPUs that nobody here has, and published how fast it went and what memory it took. The planner was
asked for each of these runs as if it were ahead: same card, model, batch, precision, checkpointing, layout and link,
nothing measured. This page shows every answer beside the published figure, misses included. A script writes it,
`benchmarks/retrodiction/report.py`, and a test fails when it is not what the planner says today.

The runs and their inputs stand in `benchmarks/retrodiction/published.toml`, each with its source. They were committed
before anything was fitted to them; a row is mended only where its inputs were copied wrongly.
"""
BLIND = """
An interval is meant to hold four outcomes of five.

**Blind** speeds are the test that counts: there the one fitted constant was set without any row of the source in
question, by the same rule from all other sources, each source held out in turn. Where one source is all there is for
an architecture nothing is left to set it from, and the row says "-": its planned speed is near because it was fitted
to be, and shows no more than that rows of one source agree with each other.

No constant of memory was computed from these rows. Whoever wrote down the planner's counts of bytes had read them,
though, and chose between ways of counting with them in view: the memory column is a check, not a blind one.
"""
RULE = """
One kind of constant, in `hardware/specs/gpus.toml`: the typical share of the peak that half-precision matrix
products reach on an architecture, {constants} numbers for {speeds} speeds. `benchmarks/retrodiction/fitted.py` carries
out the rule: of each row the share that would make the plan equal the published speed; the median of a source's rows;
the median of the sources. No row has a number of its own. The low and the high share of an architecture were set by
hand from the spread of these shares, wider where there is one source. Everything else (bytes between products,
launches, the optimizer, links, memory) is counted or comes from a source that the code names, the same for every card.
"""
ASSUMED = "Every other architecture of the table is assumed from a neighbour that its entry names: no row tests it."
COUNTED = """
Allocated: live tensors alone. Reserved: with what the allocator holds and does not use. Card: with the runtime's own.
"""
MISSED = {
    "nanogpt-a100-8": 'a rounded "about 4 days"; llm.c on A100 is twice as fast, and both are rows of this page',
    "tune-4090-lora": "the published speed needs every product at the card's full rate",
    "ao-optim-fused": "it moves more bytes than the 8-bit rows beside it, and was published as the faster one",
    "amd-mi300x-float32": "a share for float32 is assumed from half precision; no other row is in float32",
    "ao-h100-8": "the recipe and the page of `ao-mi300x-8` and `ao-b200-8`, which the plan meets; the source does not"
    " say what differs",
    "nanogpt-compile-gain": "one figure, of a PyTorch of 2022",
}


def page() -> str:
    found = answers()
    parts = (_summary(found), _speeds(found), _memory(found), _misses(found), _fitted(), _left_out())
    return "\n".join(
        ["# How near `bloomery plan` comes", "", *_prose(INTRO), *(line for part in parts for line in part)]
    )


def _prose(text: str) -> Iterator[str]:
    for paragraph in text.strip().split("\n\n"):
        yield from textwrap.wrap(paragraph, 120, break_on_hyphens=False)
        yield ""


def of(found: list[Answer], what: str) -> list[Answer]:
    return [answer for answer in found if answer.what == what]


def blind(found: list[Answer]) -> list[Answer]:
    """Speeds again, each by a constant that its source had no part in."""
    again = ((answer, blind_speed(answer.row)) for answer in of(found, "speed"))
    return [Answer(answer.row, "speed", answer.published, planned) for answer, planned in again if planned is not None]


def inside(found: list[Answer]) -> float:
    return sum(answer.inside for answer in found) / len(found)


def missed(found: list[Answer]) -> float:
    return median(abs(answer.error) for answer in found)


def width(found: list[Answer]) -> float:
    """The upper end over the lower one."""
    return median(answer.planned.high / answer.planned.low for answer in found)


def _summary(found: list[Answer]) -> Iterator[str]:
    yield "| figures | how many | inside the plan's interval | median error | upper end over lower end, median |"
    yield "|---|--:|--:|--:|--:|"
    for name, some in (
        ("speed, blind", blind(found)),
        ("speed, as planned today", of(found, "speed")),
        ("memory", of(found, "memory")),
        ("gain of compiling", of(found, "compile_gain")),
    ):
        yield f"| {name} | {len(some)} | {inside(some):.0%} | {missed(some):.1%} | {width(some):.2f} |"
    yield ""
    yield from _prose(BLIND)


def _speeds(found: list[Answer]) -> Iterator[str]:
    yield "## Speed, tokens/s of one GPU"
    yield ""
    yield "| run | GPU | published | planned | interval | error | blind | |"
    yield "|---|---|--:|--:|---|--:|--:|---|"
    for answer in of(found, "speed"):
        again = blind_speed(answer.row)
        alone = "-" if again is None else f"{again.value / answer.published - 1:+.0%}"
        ends = f"{_number(answer.planned.low)} to {_number(answer.planned.high)}"
        yield (
            f"| {_named(answer)} | {_gpus(answer.row)} | {_number(answer.published)} |"
            f" {_number(answer.planned.value)} | {ends} | {answer.error:+.0%} | {alone} | {_verdict(answer)} |"
        )
    yield ""


def _memory(found: list[Answer]) -> Iterator[str]:
    yield "## Memory, GiB of one GPU, and the gain of compiling"
    yield ""
    yield "| run | counted as | published | planned | interval | error | |"
    yield "|---|---|--:|--:|---|--:|---|"
    for answer in [*of(found, "memory"), *of(found, "compile_gain")]:
        kind = answer.row["memory_is"] if answer.what == "memory" else "eager over compiled"
        ends = f"{answer.planned.low:.3g} to {answer.planned.high:.3g}"
        yield (
            f"| {_named(answer)} | {kind} | {answer.published:.3g} | {answer.planned.value:.3g} | {ends} |"
            f" {answer.error:+.0%} | {_verdict(answer)} |"
        )
    yield ""
    yield from _prose(COUNTED)


def _misses(found: list[Answer]) -> Iterator[str]:
    yield "## The misses"
    yield ""
    for answer in found:
        if not answer.inside:
            yield f"- {_named(answer)}, {answer.what.replace('_', ' ')}: {MISSED.get(answer.row['id'], 'unexplained')}."
    yield ""


def _fitted() -> Iterator[str]:
    yield "## What was fitted"
    yield ""
    yield from _prose(RULE.format(constants=len(fitted()), speeds=len(rows())))
    yield "| architecture | by the rule | in the table | shares that the rows of each source need |"
    yield "|---|--:|--:|---|"
    for arch, typical, held, sources in fitted():
        each = "; ".join(f"{name}: {', '.join(f'{share:.2f}' for share in shares)}" for name, shares in sources.items())
        yield f"| {', '.join(family_of(arch))} | {typical:.3f} | {held:.2f} | {each} |"
    yield ""
    yield from _prose(ASSUMED)


def _left_out() -> Iterator[str]:
    yield "## Left out, and why"
    yield ""
    for entry in table()["left_out"]:
        yield f"- {entry['what']}: {entry['reason']}."
    yield ""
    yield "## Sources, and how each row was read"
    yield ""
    for row in table()["row"]:
        remarks = [row["source"], *(f"{key}: {row[key]}" for key in ("derived", "assumed") if key in row)]
        yield f"- `{row['id']}`: {'; '.join(remarks)}."
    yield ""


def _named(answer: Answer) -> str:
    return f"`{answer.row['id']}`"


def _gpus(row: dict[str, Any]) -> str:
    return f"{row['gpus'] * row.get('nodes', 1)} x {row['gpu']}"


def _verdict(answer: Answer) -> str:
    return "inside" if answer.inside else "**outside**"


def _number(value: float) -> str:
    """Three digits that count."""
    return f"{float(f'{value:.3g}'):,.0f}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE} is written\n")
