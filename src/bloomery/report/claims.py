"""What the author expected, against what the run did."""

from collections.abc import Callable, Iterator

from bloomery.core.units import GIB, Duration, format_count, format_seconds
from bloomery.plan.types import Verdict
from bloomery.recipe.values import ClaimedRange
from bloomery.report.record import Record

_ROUNDING = 0.05  # "10B tokens" is a round figure
_NEAR = 0.05  # an evaluation this near to the claimed step judges it


def judge_run(record: Record) -> tuple[Verdict, ...]:
    """One verdict for each claim of `expect`, in the order of its keys, as the plan's are."""
    return tuple(_verdicts(record))


def _verdicts(record: Record) -> Iterator[Verdict]:
    expect, tally, done = record.expect, record.tally, record.state == "done"
    if expect.tokens is not None:
        claim = f"{_span(expect.tokens, format_count)} tokens"
        yield _at_the_end(claim, expect.tokens, float(tally.tokens), f"{format_count(tally.tokens)} tokens", done)
    if expect.epochs is not None:
        yield _epochs(expect.epochs, record, done)
    if expect.tokens_per_second is not None:
        claim, speed = f"{_span(expect.tokens_per_second, format_count)} tokens/s", record.tokens_per_second
        yield (
            _open(claim) if speed is None else _within(claim, expect.tokens_per_second, speed, f"{speed:,.0f} tokens/s")
        )
    if expect.duration is not None:
        claim = _span(expect.duration, format_seconds)
        yield _at_the_end(claim, expect.duration, tally.seconds, f"it took {format_seconds(tally.seconds)}", done)
    if expect.memory is not None:
        claim, peak = _span(expect.memory, _gib), tally.peak_gib
        yield _within(claim, expect.memory, peak * GIB, f"{peak:.2f} GiB at the peak") if peak else _open(claim)
    for when, claimed in expect.perplexity.items():
        yield _perplexity(when, claimed, record)


def _epochs(claimed: ClaimedRange, record: Record, done: bool) -> Verdict:
    claim = f"{_span(claimed, _plain)} epochs"
    if record.manifest is None or not record.manifest.train.tokens:
        return Verdict(claim=claim, verdict="open", because="the prepared text is not there to be counted")
    seen = record.tally.tokens / record.manifest.train.tokens
    size = format_count(record.manifest.train.tokens)
    return _at_the_end(claim, claimed, seen, f"{seen:.2f} times the {size} tokens of the text", done)


def _perplexity(when: Duration, claimed: ClaimedRange, record: Record) -> Verdict:
    claim = f"perplexity {_span(claimed, _plain)} after {when}"
    step = _step_of(when, record)
    measured = [event for event in record.evals if event.perplexity is not None]
    if step is None or not measured:
        return Verdict(claim=claim, verdict="open", because="nothing was evaluated there")
    nearest = min(measured, key=lambda event: abs(event.step - step))
    if abs(nearest.step - step) > max(_NEAR * step, 1) or nearest.perplexity is None:
        return Verdict(claim=claim, verdict="open", because=f"the nearest evaluation is of step {nearest.step:,}")
    return _within(claim, claimed, nearest.perplexity, f"{nearest.perplexity:.4g} at step {nearest.step:,}")


def _step_of(when: Duration, record: Record) -> float | None:
    tally, manifest = record.tally, record.manifest
    tokens_per_step = tally.tokens / tally.step if tally.step else None
    match when.unit:
        case "steps":
            return when.amount
        case "tokens":
            return when.amount / tokens_per_step if tokens_per_step else None
        case "epochs":
            return when.amount * manifest.train.tokens / tokens_per_step if manifest and tokens_per_step else None
        case "percent":
            return when.amount / 100 * tally.steps if tally.steps else None
        case "seconds":
            return next((float(s.step) for s in record.steps if s.time - (tally.began or 0) >= when.amount), None)


def _at_the_end(claim: str, claimed: ClaimedRange, value: float, told: str, done: bool) -> Verdict:
    """A claim about the whole run: too much is wrong at any time, too little only when it has ended."""
    if done or value > claimed[1] * (1 + _ROUNDING):
        return _within(claim, claimed, value, told)
    return Verdict(claim=claim, verdict="open", because=f"{told} so far")


def _within(claim: str, claimed: ClaimedRange, value: float, told: str) -> Verdict:
    inside = claimed[0] * (1 - _ROUNDING) <= value <= claimed[1] * (1 + _ROUNDING)
    return Verdict(claim=claim, verdict="fits" if inside else "wrong", because=told)


def _open(claim: str) -> Verdict:
    return Verdict(claim=claim, verdict="open", because="nothing was measured")


def _span(claimed: ClaimedRange, write: Callable[[float], str]) -> str:
    low, high = write(claimed[0]), write(claimed[1])
    return low if low == high else f"{low} to {high}"


def _plain(value: float) -> str:
    return f"{value:,g}"


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
