"""What decides about a run, as numbers with a sentence each: the first is the largest of the page. No torch."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from bloomery.core.text import harmless
from bloomery.core.units import GIB, format_seconds
from bloomery.monitor.events import EvalDone
from bloomery.studio.components import Tone
from bloomery.studio.watching import OpenRun, method_of, model_of, planned_speed
from bloomery.view.reader import LIVE
from bloomery.view.summary import RunSummary

NEAR = 0.02  # relative; a figure this near to the plan's is as planned
FAR = 0.15  # relative; a figure this much worse than the plan's wants a look
FLAT = 0.002  # relative; an evaluation this near to the best is level with it


@dataclass(frozen=True)
class Figure:
    """`below`: a sentence that says what the number means."""

    label: str
    value: str
    below: str = ""
    tone: Tone = ""
    unit: str = ""


def headline(opened: OpenRun) -> Iterator[Figure]:
    """What decides comes first: the best validation loss or reward, else the newest of training."""
    summary = opened.summary
    yield from _decides(summary)
    yield from _of_training(summary)
    yield from _of_speed(opened)
    yield from _of_memory(opened)
    yield from _of_checkpoint(opened)


def subtitle(opened: OpenRun) -> str:
    """What the run is, and how far."""
    summary = opened.summary
    plan = opened.reader.plan
    words: list[str] = []
    if plan is not None:
        words += [model_of(plan), method_of(plan)]
    if summary.began is not None:
        began = time.localtime(summary.began)
        today = began[:3] == time.localtime()[:3]
        words.append(f"started {time.strftime('%H:%M' if today else '%Y-%m-%d %H:%M', began)}")
    steps = summary.planned_steps or opened.reader.planned.steps
    step = f"step {summary.step:,}" + (f" of {steps:,}" if steps else "")
    if opened.status == "running" and (seconds := summary.eta_seconds):
        step += f", about {format_seconds(seconds)} left"
    words.append(step)
    if opened.status not in LIVE and summary.seconds:
        words.append(f"took {format_seconds(summary.seconds)}")
    return harmless(" · ".join(filter(None, words)))


def _score(evaluation: EvalDone, *, of_reward: bool) -> float | None:
    return evaluation.metrics.get("reward") if of_reward else evaluation.loss


def best_evaluation(summary: RunSummary) -> tuple[int, float] | None:
    """Step and value: the highest reward of held-out prompts, or the lowest loss; the first of equals."""
    of_reward = summary.scores_completions
    scores = [
        (step, score)
        for step, evaluation in sorted(summary.evaluations.items())
        if (score := _score(evaluation, of_reward=of_reward)) is not None
    ]
    if not scores:
        return None
    return max(scores, key=lambda one: (one[1] if of_reward else -one[1], -one[0]))


def _decides(summary: RunSummary) -> Iterator[Figure]:
    of_reward = summary.scores_completions
    best = best_evaluation(summary)
    if best is not None:
        what = "Reward of held-out prompts" if of_reward else "Validation loss"
        scores = [
            (step, score)
            for step, evaluation in sorted(summary.evaluations.items())
            if (score := _score(evaluation, of_reward=of_reward)) is not None
        ]
        is_over = summary.ended is not None
        below, tone = trend(scores, best, higher_is_better=of_reward, is_over=is_over)
        so_far = "" if is_over else " so far"
        yield Figure(f"{what}, best{so_far}", _digits(best[1]), below, tone)
    elif of_reward and summary.smoothed_reward is not None:
        yield Figure(
            "Reward, moving average",
            _digits(summary.smoothed_reward),
            "of the prompts trained on: none are held out",
            "muted",
        )
    elif summary.smoothed is not None:
        yield Figure(
            "Training loss, moving average",
            _digits(summary.smoothed),
            "an evaluation decides: none so far",
            "muted",
        )


def trend(
    scores: list[tuple[int, float]],
    best: tuple[int, float],
    *,
    higher_is_better: bool,
    is_over: bool = False,
) -> tuple[str, Tone]:
    """How the newest evaluations stand to the best one, as a sentence. `is_over`: the run has ended."""
    step, value = best
    newest_step, newest = scores[-1]
    at = f"at step {step:,}"
    if len(scores) == 1:
        return f"{at}, the first evaluation", ""
    if newest_step == step:
        before = _digits(scores[-2][1])
        if is_over:
            return f"{at}, the last evaluation; {before} one before", "good"
        return (
            f"{at}; {'rises' if higher_is_better else 'falls'} still: {before} one evaluation ago",
            "good",
        )
    if abs(newest - value) <= FLAT * abs(value):
        return f"{at}; level since: {_digits(newest)} now", ""
    # Since the best one, evaluations that were worse than the one before.
    later = [score for at_step, score in scores if at_step >= step]
    worse = sum((b < a) if higher_is_better else (b > a) for a, b in pairwise(later))
    moved = "lower" if higher_is_better else "higher"
    times = f", {worse} evaluations the wrong way" if worse > 1 else ""
    return f"{at}; {moved} since: {_digits(newest)} now{times}", "warn"


def _of_training(summary: RunSummary) -> Iterator[Figure]:
    if not summary.evaluations:
        return
    if summary.scores_completions:
        if summary.smoothed_reward is not None:
            yield Figure("Reward in training, smoothed", _digits(summary.smoothed_reward))
    elif summary.smoothed is not None:
        gap = ""
        if (newest := summary.evaluation) is not None and newest.loss:
            share = (newest.loss - summary.smoothed) / newest.loss
            gap = "level with validation" if abs(share) < NEAR else _than(-share, "validation")
        yield Figure("Training loss, smoothed", _digits(summary.smoothed), gap, "muted")


def _of_speed(opened: OpenRun) -> Iterator[Figure]:
    speed = opened.summary.tokens_per_second
    if not speed:
        return
    planned = planned_speed(opened.reader.plan)
    below = ""
    tone: Tone = "muted"
    if planned:
        share = speed / planned - 1
        below = (
            f"{_than(share, 'the plan')}: {planned:,.0f}" if abs(share) >= NEAR else "as planned"
        )
        tone = "warn" if share < -FAR else "good" if share > -NEAR else "muted"
    yield Figure("Speed", f"{speed:,.0f}", below, tone, "tokens/s")


def _of_memory(opened: OpenRun) -> Iterator[Figure]:
    peak = opened.summary.peak_gib
    if not peak:
        return
    plan = opened.reader.plan
    below = ""
    tone: Tone = "muted"
    if plan is not None and plan.memory.total:
        share = peak / (plan.memory.total / GIB) - 1
        figure = f"{plan.memory.total / GIB:.1f} GiB"
        below = (
            f"{_than(share, 'the plan')}: {figure}"
            if abs(share) >= NEAR
            else f"as planned: {figure}"
        )
        # A plan that is too small may end in no memory: any figure above it wants a look.
        tone = "warn" if share >= NEAR else "good"
    yield Figure("Memory, peak", f"{peak:.1f}", below, tone, "GiB")


def _of_checkpoint(opened: OpenRun) -> Iterator[Figure]:
    saved = opened.view.saved
    is_live = opened.status in LIVE
    if saved is None:
        if is_live and opened.summary.step:
            seconds = opened.summary.clock.until(time.time())
            lost = f"a kill now loses all {format_seconds(seconds)}"
            yield Figure("Last checkpoint", "none yet", lost, "warn")
        return
    if not is_live:
        steps = opened.summary.step - saved.step
        below = "the last step is saved" if steps <= 0 else f"{steps:,} steps before the end"
        yield Figure("Last checkpoint", f"step {saved.step:,}", below, "muted")
        return
    seconds = max(0.0, time.time() - saved.time)
    yield Figure(
        "Last checkpoint",
        f"{format_seconds(seconds)} ago",
        f"a kill now loses {format_seconds(seconds)}",
        "muted",
    )


def _than(share: float, what: str) -> str:
    return f"{abs(share):.0%} {'above' if share > 0 else 'below'} {what}"


def _digits(value: float) -> str:
    """Three digits after the point, of a small value as many as tell something."""
    return f"{value:.3f}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"
