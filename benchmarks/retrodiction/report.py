"""Writes docs/explanation/plan-accuracy.md: `python benchmarks/retrodiction/report.py`."""

import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from ask import HERE, Answer, answers, table
from fitted import blind_speed, family_of, fitted, rows

PAGE = HERE.parents[1] / "docs/explanation/plan-accuracy.md"
INSIDE = 0.80  # of the figures
ERROR = {"speed": 0.15, "memory": 0.08}  # at the median

INTRO = """
Compare the planner with 35 published runs, and write this page:

```bash
python benchmarks/retrodiction/report.py
```

Other projects published the speed and memory of training runs on GPUs. The planner planned each run before it saw the
result: same GPU, model, batch, precision, checkpointing, layout and link, no measurement. This page shows every plan
next to the published figure, with the errors. A test fails if the page differs from the planner's current output.

Runs, inputs and sources are in `benchmarks/retrodiction/published.toml`. They were committed before any constant was
fitted to them. A row changes only if an input was copied incorrectly.
"""
BLIND = """
An interval should contain four outcomes of five.

**Blind** speeds are the real test: the one fitted constant comes from all other sources (leave one source out). If an
architecture has one source only, there is no blind value ("-"). Its plan is close because the constant was fitted to
that source.

No memory constant was fitted to these rows. The authors of the memory formulas had read these rows, so the memory
column is a check, not a blind test.
"""
RULE = """
One kind of constant, in `hardware/gpus.toml`: the typical share of the peak that half-precision matmuls reach on
an architecture, {constants} numbers for {speeds} speeds. `benchmarks/retrodiction/fitted.py` computes it:

1. For each row, the share with which the plan equals the published speed.
2. The median of the rows of a source.
3. The median of the sources.

No row has its own constant. Low and high shares were set by hand from the spread, wider for a single source.
Everything else is counted, or has a source in the code, and is the same for every GPU.
"""
ASSUMED = "Every other architecture takes its share from a similar one, named in its entry. No row tests it."
COUNTED = """
Allocated: tensors. Reserved: tensors and what the allocator keeps. GPU: with the runtime's own memory.
"""
MISSED = {
    "nanogpt-a100-8": 'a rounded "about 4 days"; llm.c on A100 is twice as fast, and both are rows of this page',
    "tune-4090-lora": "the published speed needs every matmul at the GPU's full rate",
    "ao-optim-fused": "it moves more bytes than the 8-bit rows, but was published as faster",
    "amd-mi300x-float32": "a share for float32 is assumed from half precision; no other row is in float32",
    "ao-h100-8": "the recipe and the page of `ao-mi300x-8` and `ao-b200-8`, which the plan meets; the source does not"
    " state the difference",
    "nanogpt-compile-gain": "one figure, of a PyTorch of 2022",
}


def page() -> str:
    found = answers()
    parts = (
        _summary(found),
        _speeds(found),
        _memory(found),
        _misses(found),
        _fitted(),
        _left_out(),
    )
    return "\n".join(
        ["# How accurate plans are", "", *_prose(INTRO), *(line for part in parts for line in part)]
    )


def _prose(text: str) -> Iterator[str]:
    yield text.strip()
    yield ""


def of(found: list[Answer], what: str) -> list[Answer]:
    return [answer for answer in found if answer.what == what]


def blind(found: list[Answer]) -> list[Answer]:
    """Speeds again, each by a constant that its source had no part in."""
    again = ((answer, blind_speed(answer.row)) for answer in of(found, "speed"))
    return [
        Answer(answer.row, "speed", answer.published, planned)
        for answer, planned in again
        if planned is not None
    ]


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
        kind = (
            answer.row["memory_is"].replace("card", "GPU")
            if answer.what == "memory"
            else "eager over compiled"
        )
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
        each = "; ".join(
            f"{name}: {', '.join(f'{share:.2f}' for share in shares)}"
            for name, shares in sources.items()
        )
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
        remarks = [
            row["source"],
            *(f"{key}: {row[key]}" for key in ("derived", "assumed") if key in row),
        ]
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
