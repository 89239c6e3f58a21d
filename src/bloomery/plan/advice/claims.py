"""The claims of a recipe, checked against a plan's arithmetic or a run's measurements."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bloomery.core.units import GIB, Duration, format_count, format_seconds, two_digits
from bloomery.plan.types import DatasetFacts, RunPlan, Verdict
from bloomery.recipe.schema import Claims
from bloomery.recipe.values import ClaimedRange

ROUNDING = 0.05  # "10B tokens" is a round figure
Need = Callable[[int], float]  # bytes of a step, by micro-batch size
Claim = (
    Literal["tokens", "epochs", "tokens_per_second", "duration", "memory"] | Duration
)  # when a perplexity is reached


@dataclass(frozen=True)
class KnownRange:
    """A figure or the range of an estimate, with the reason of a verdict.

    A claim outside the range is wrong; a claim inside `near` times the range is low or high. `otherwise` gives the
    reason of a verdict other than "ok".
    """

    low: float
    high: float
    reason: str
    otherwise: Callable[[str], str] | None = None
    slack: float = ROUNDING
    near: float = 1.0


def compare_claims(expected: Claims, known: Callable[[Claim, ClaimedRange], KnownRange | str]) -> tuple[Verdict, ...]:
    """Every claim of a recipe in the order of its keys. `known` gives a reason where a claim cannot be checked yet."""

    def written(claimed: ClaimedRange, write: Callable[[float], str]) -> str:
        low, high = (write(end) for end in claimed)
        return low if low == high else f"{low} to {high}"

    def plain(value: float) -> str:
        return f"{value:,.4g}" if value < 10_000 else f"{value:,.0f}"

    claims: list[tuple[Claim, ClaimedRange, str]] = []
    if expected.tokens is not None:
        claims.append(("tokens", expected.tokens, f"{written(expected.tokens, format_count)} tokens"))
    if expected.epochs is not None:
        claims.append(("epochs", expected.epochs, f"{written(expected.epochs, plain)} epochs"))
    if (speed := expected.tokens_per_second) is not None:
        claims.append(("tokens_per_second", speed, f"{written(speed, plain)} tokens/s"))
    if expected.duration is not None:
        claims.append(("duration", expected.duration, span(expected.duration, trimmed=True)))
    if expected.memory is not None:
        gigabytes = written(expected.memory, lambda value: f"{value / 1e9:.3g}")
        claims.append(("memory", expected.memory, f"{gigabytes} GB"))
    for when, perplexity in expected.perplexity.items():
        claims.append((when, perplexity, f"perplexity {written(perplexity, plain)} at {when}"))

    verdicts = []
    for claim, (low, high), text in claims:
        found = known(claim, (low, high))
        if isinstance(found, str):
            verdicts.append(Verdict(claim=text, verdict="unknown", reason=found))
            continue
        verdict: Literal["ok", "low", "high", "wrong"] = "wrong"
        if high * (1 + found.slack) >= found.low and low * (1 - found.slack) <= found.high:
            verdict = "ok"
        elif high * found.near >= found.low and low <= found.high * found.near:
            verdict = "low" if high < found.low else "high"
        reason = found.reason if verdict == "ok" or found.otherwise is None else found.otherwise(verdict)
        verdicts.append(Verdict(claim=text, verdict=verdict, reason=reason))
    return tuple(verdicts)


def check_claims(expected: Claims, plan: RunPlan, *, dataset: DatasetFacts | None, need: Need) -> tuple[Verdict, ...]:
    """The claims against the plan's arithmetic, before the run."""
    timed = "known once the first steps are measured"
    open_length = timed if plan.train.seconds is not None else "known once the dataset is prepared"

    def known(claim: Claim, claimed: ClaimedRange) -> KnownRange | str:
        match claim:
            case "tokens":
                unknown = plan.total_tokens is None or plan.train.steps is None
                return open_length if unknown else _tokens(claimed, plan)
            case "epochs":
                return _epochs(claimed, plan, dataset, open_length)
            case "tokens_per_second":
                return _speed(claimed, plan)
            case "duration":
                if plan.seconds is None:
                    return "the step time of this device is unknown"
                low, high = plan.seconds.low, plan.seconds.high
                where = "within" if claimed[0] >= low and claimed[1] <= high else "overlaps"
                planned = span((low, high))
                return KnownRange(
                    low, high, f"{where} {planned}", lambda _: f"the run takes {planned}", slack=0.0, near=1e30
                )
            case "memory":
                total, sequences = plan.memory.total, plan.train.micro_batch_size
                reason = f"{total / GIB:.1f} GiB at micro-batch {sequences}"

                def otherwise(_: str) -> str:
                    return reason + (f"; micro-batch 1 needs about {need(1) / GIB:.1f}" if sequences > 1 else "")

                return KnownRange(total, total, reason, otherwise, near=1e30)
        vocabulary, steps = plan.model.config.vocab_size, plan.train.steps
        if claimed[0] > vocabulary:
            return KnownRange(
                0.0, vocabulary, f"a random guess among {vocabulary:,} tokens has perplexity {vocabulary:,}", slack=0.0
            )
        if claim.unit == "steps" and steps is not None and claim.amount > steps:
            return KnownRange(math.inf, math.inf, f"the run ends at step {steps:,}")
        return "only a run can measure this; its report shows it"

    return compare_claims(expected, known)


def _tokens(claimed: ClaimedRange, plan: RunPlan) -> KnownRange:
    assert plan.total_tokens is not None
    tokens = plan.total_tokens
    length, each = plan.data.sequence_length, plan.train.tokens_per_step
    product = f"{plan.train.steps:,} x {each // length:,} x {length:,} = {format_count(tokens)}"
    steps = -(-int(claimed[0]) // each)
    needed = f"{product}; {format_count(claimed[0])} are {steps:,} steps"
    if plan.step_seconds is not None:
        needed += f", {format_seconds(plan.step_seconds.value * steps)}"
    return KnownRange(tokens, tokens, product, lambda _: needed)


def _epochs(claimed: ClaimedRange, plan: RunPlan, dataset: DatasetFacts | None, open_length: str) -> KnownRange | str:
    if plan.total_tokens is None:
        wanted = plan.lengths.train if plan.lengths is not None else None
        if wanted is None or wanted.unit != "epochs":
            return open_length
        return KnownRange(wanted.amount, wanted.amount, f"train.epochs is {wanted.amount:g}", slack=0.0)
    if dataset is None:
        size = format_count(plan.total_tokens / claimed[0]) if claimed[0] else "no"
        return f"true for a dataset of {size} tokens; none is prepared"
    epochs = plan.total_tokens / (dataset.sequences_per_epoch * plan.data.sequence_length)
    reason = f"{format_count(plan.total_tokens)} tokens are {epochs:.2g} epochs of {format_count(dataset.tokens)}"
    return KnownRange(epochs, epochs, reason, slack=ROUNDING + dataset.spread)


def _speed(claimed: ClaimedRange, plan: RunPlan) -> KnownRange | str:
    if plan.step_seconds is None:
        return "the speed of this device is unknown"
    rate = plan.step_seconds.inverse(plan.train.tokens_per_step)
    planned = f"{two_digits(rate.low)} to {two_digits(rate.high)} tokens/s"

    def otherwise(verdict: str) -> str:
        if verdict != "wrong":
            return f"outside {planned}"
        if plan.total_tokens is None:
            return f"the plan estimates {planned}"
        time = roughly(plan.total_tokens / max(claimed[1], 1e-9))
        return f"{format_count(plan.total_tokens)} tokens would take {time}"

    return KnownRange(rate.low, rate.high, f"within {planned}", otherwise, slack=0.0, near=3.0)


def span(ends: ClaimedRange, *, trimmed: bool = False) -> str:
    """ "4.0 to 8.0 days": the unit once where both ends have the same. `trimmed`: whole numbers without ".0"."""
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
