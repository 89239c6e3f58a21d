"""The author's claims against the plan's arithmetic. Nothing here knows a recipe by name."""

import re
from collections.abc import Callable, Iterator

from bloomery.core.units import GIB, Duration, format_count, format_seconds, two_digits
from bloomery.plan.types import CorpusFacts, Estimate, Plan, Verdict
from bloomery.recipe.schema import Expect
from bloomery.recipe.values import ClaimedRange

ROUNDING = 0.05  # "10B tokens" is a round figure
Need = Callable[[int], float]  # bytes that a step needs, by rows of its micro-batch


def judge(expect: Expect, plan: Plan, *, corpus: CorpusFacts | None, need: Need) -> tuple[Verdict, ...]:
    """Every claim of `expect` in the order of its keys."""
    return tuple(_verdicts(expect, plan, corpus, need))


def _verdicts(expect: Expect, plan: Plan, corpus: CorpusFacts | None, need: Need) -> Iterator[Verdict]:
    if expect.tokens is not None:
        yield _tokens(expect.tokens, plan)
    if expect.epochs is not None:
        yield _epochs(expect.epochs, plan, corpus)
    if expect.tokens_per_second is not None:
        yield _speed(expect.tokens_per_second, plan)
    if expect.duration is not None:
        yield _duration(expect.duration, plan.seconds)
    if expect.memory is not None:
        yield _memory(expect.memory, plan, need)
    for when, claimed in expect.perplexity.items():
        yield _perplexity(when, claimed, plan)


def _tokens(claimed: ClaimedRange, plan: Plan) -> Verdict:
    claim = f"{_range(claimed, format_count)} tokens"
    if plan.total_tokens is None or plan.train.steps is None:
        return Verdict(claim=claim, verdict="open", because=_open_length(plan))
    tokens, length = plan.total_tokens, plan.data.sequence_length
    rows = plan.train.tokens_per_step // length
    product = f"{plan.train.steps:,} x {rows:,} x {length:,} = {format_count(tokens)}"
    if claimed[0] * (1 - ROUNDING) <= tokens <= claimed[1] * (1 + ROUNDING):
        return Verdict(claim=claim, verdict="fits", because=product)
    steps = -(-int(claimed[0]) // plan.train.tokens_per_step)
    needed = f"{product}; {format_count(claimed[0])} are {steps:,} steps"
    if plan.step_seconds is not None:
        needed += f", {format_seconds(plan.step_seconds.value * steps)}"
    return Verdict(claim=claim, verdict="wrong", because=needed)


def _open_length(plan: Plan) -> str:
    return (
        "known once the first steps are timed" if plan.train.seconds is not None else "known once the text is counted"
    )


def _epochs(claimed: ClaimedRange, plan: Plan, corpus: CorpusFacts | None) -> Verdict:
    claim = f"{_range(claimed, _plain)} epochs"
    if plan.total_tokens is None:
        wanted = plan.lengths.train if plan.lengths is not None else None
        if wanted is not None and wanted.unit == "epochs":
            inside = claimed[0] <= wanted.amount <= claimed[1]
            return Verdict(claim=claim, verdict="fits" if inside else "wrong", because=f"train.length is {wanted}")
        return Verdict(claim=claim, verdict="open", because=_open_length(plan))
    if corpus is None:
        size = format_count(plan.total_tokens / claimed[0]) if claimed[0] else "no"
        because = f"true for a corpus of {size} tokens; there is none here to count"
        return Verdict(claim=claim, verdict="open", because=because)
    seen = plan.total_tokens / (corpus.rows_per_epoch * plan.data.sequence_length)
    because = f"{format_count(plan.total_tokens)} tokens are {seen:.2g} epochs of {format_count(corpus.tokens)}"
    slack = ROUNDING + corpus.spread
    inside = claimed[0] * (1 - slack) <= seen <= claimed[1] * (1 + slack)
    return Verdict(claim=claim, verdict="fits" if inside else "wrong", because=because)


def _speed(claimed: ClaimedRange, plan: Plan) -> Verdict:
    claim = f"{_range(claimed, _plain)} tokens/s"
    if plan.step_seconds is None:
        return Verdict(claim=claim, verdict="open", because="nothing is known of this device's speed")
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step)
    planned = f"{two_digits(rate.low)} to {two_digits(rate.high)} tokens/s"
    if claimed[1] >= rate.low and claimed[0] <= rate.high:
        return Verdict(claim=claim, verdict="fits", because=f"inside {planned}")
    near = claimed[1] >= rate.low / 3 and claimed[0] <= rate.high * 3
    if near:
        return Verdict(claim=claim, verdict="low" if claimed[1] < rate.low else "high", because=f"outside {planned}")
    if plan.total_tokens is None:
        return Verdict(claim=claim, verdict="wrong", because=f"the table says {planned}")
    time = roughly(plan.total_tokens / max(claimed[1], 1e-9))
    because = f"{format_count(plan.total_tokens)} tokens would take {time}"
    return Verdict(claim=claim, verdict="wrong", because=because)


def _duration(claimed: ClaimedRange, seconds: Estimate | None) -> Verdict:
    claim = span(claimed, trimmed=True)
    if seconds is None:
        return Verdict(claim=claim, verdict="open", because="the length of a step is unknown here")
    planned = span((seconds.low, seconds.high))
    if claimed[0] >= seconds.low and claimed[1] <= seconds.high:
        return Verdict(claim=claim, verdict="fits", because=f"inside {planned}")
    if claimed[0] <= seconds.high and claimed[1] >= seconds.low:
        return Verdict(claim=claim, verdict="fits", because=f"overlaps {planned}")
    return Verdict(claim=claim, verdict="low" if claimed[1] < seconds.low else "high", because=f"it takes {planned}")


def _memory(claimed: ClaimedRange, plan: Plan, need: Need) -> Verdict:
    claim = f"{_range(claimed, lambda value: f'{value / 1e9:.3g}')} GB"
    total, rows = plan.memory.total, plan.train.micro_batch
    because = f"{total / GIB:.1f} GiB at micro-batch {rows}"
    if claimed[0] * (1 - ROUNDING) <= total <= claimed[1] * (1 + ROUNDING):
        return Verdict(claim=claim, verdict="fits", because=because)
    if rows > 1:
        because += f"; a micro-batch of 1 needs about {need(1) / GIB:.1f}"
    return Verdict(claim=claim, verdict="high" if claimed[0] > total else "low", because=because)


def _perplexity(when: Duration, claimed: ClaimedRange, plan: Plan) -> Verdict:
    claim = f"perplexity {_range(claimed, _plain)} at {when}"
    vocabulary = plan.model.config.vocab_size
    if claimed[0] > vocabulary:
        because = f"guessing among {vocabulary:,} tokens is already better"
        return Verdict(claim=claim, verdict="wrong", because=because)
    if when.unit == "steps" and plan.train.steps is not None and when.amount > plan.train.steps:
        return Verdict(claim=claim, verdict="wrong", because=f"the run ends at step {plan.train.steps:,}")
    return Verdict(claim=claim, verdict="open", because="only the run can tell; its report does")


def _range(claimed: ClaimedRange, write: Callable[[float], str]) -> str:
    low, high = (write(end) for end in claimed)
    return low if low == high else f"{low} to {high}"


def _plain(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"


def span(ends: ClaimedRange, *, trimmed: bool = False) -> str:
    """ "4.0 to 8.0 days": the unit once where both ends share it. `trimmed`: whole numbers without their zero."""
    low, high = (format_seconds(end) for end in ends)
    if trimmed and all(re.search(r"\.0 |^[\d,]+ ", text) for text in (low, high)):
        low, high = (text.replace(".0 ", " ") for text in (low, high))
    if low == high:
        return low
    low_number, _, low_unit = low.partition(" ")
    high_unit = high.partition(" ")[2]
    return f"{low_number} to {high}" if low_unit == high_unit else f"{low} to {high}"


def roughly(seconds: float) -> str:
    """Ten or more of a unit need no decimals: "20 years"."""
    number, _, unit = format_seconds(seconds).partition(" ")
    return f"{number} {unit}" if unit == "years" or float(number) < 10 else f"{float(number):.0f} {unit}"
