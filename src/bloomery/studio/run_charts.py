"""What the page of a run shows in numbers: figures next to the plan, and its charts. No torch."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bloomery.core.text import harmless
from bloomery.core.units import GIB, format_joules, format_seconds
from bloomery.monitor.words import eval_text, figure
from bloomery.report.rewards import (
    DRAWN_ELSEWHERE,
    GROUPS,
    METRIC_UNITS,
    PREFERENCES,
    ROUTER_GROUPS,
    mean_rewards,
    title_of,
)
from bloomery.studio.charts import Best, Level
from bloomery.studio.watching import MFU, OpenRun, planned_speed
from bloomery.view.curves import NO_POINTS, Points, rounded_points
from bloomery.view.reader import LIVE
from bloomery.view.summary import in_millions


@dataclass(frozen=True)
class Chart:
    """`curves`: their labels by name. `evaluated`: what evaluations add as dots, the loss or a metric; "": nothing."""

    title: str
    curves: Mapping[str, str]
    unit: str = ""
    levels: tuple[Level, ...] = ()
    evaluated: str = ""
    of_devices: bool = False
    best: Best = ""  # of its evaluations
    smooths: bool = False  # noisy from step to step
    color: int = 0  # of the first curve
    leads: bool = False  # what decides about the run


def run_figures(opened: OpenRun) -> Iterator[tuple[str, str]]:
    """Labels and values, each next to the plan's figure."""
    reader = opened.reader
    summary = opened.summary
    plan = reader.plan
    steps = summary.planned_steps or reader.planned.steps
    yield "Step", f"{summary.step:,}" + (f" of {steps:,}" if steps else "")
    if summary.smoothed is not None:
        yield f"Loss, moving average, {summary.unit}", f"{summary.smoothed:.4f}"
    if summary.smoothed_reward is not None:
        yield "Reward", f"{summary.smoothed_reward:.3f}"
    if summary.evaluation is not None:
        has_bits = summary.evaluation.bits_per_byte is not None
        label = "Validation, bits per byte" if has_bits else "Validation"
        yield label, f"{eval_text(summary.evaluation)} at step {summary.evaluation.step:,}"
    speed = summary.tokens_per_second
    planned = planned_speed(plan)
    if speed:
        yield "Tokens per second", f"{speed:,.0f}" + (f" (plan {planned:,.0f})" if planned else "")
        if utilization := reader.planned.utilization(speed):
            yield MFU, f"{utilization:.1%}"
    if summary.peak_gib:
        of_plan = "" if plan is None else f" (plan {plan.memory.total / GIB:.1f} GiB)"
        yield "Peak memory", f"{summary.peak_gib:.1f} GiB{of_plan}"
    if summary.tokens:
        yield "Tokens", in_millions(summary.tokens)
    is_live = opened.status in LIVE
    end = time.time() if is_live or summary.latest_time is None else summary.latest_time
    yield "Time", format_seconds(summary.clock.until(end))
    if opened.status == "running" and (seconds := summary.eta_seconds):
        yield "Time left", format_seconds(seconds)
    for device in summary.devices.all:
        sample = device.latest
        cells = (
            figure(sample.utilization, ".0f", "%"),
            figure(sample.temperature, ".0f", " °C"),
            figure(sample.power, ",.0f", " W"),
            figure(sample.memory_gib, ".1f", " GiB"),
            f"throttled: {sample.throttled}" if sample.throttled else "",
        )
        if text := " · ".join(filter(None, cells)):
            yield device.name, text
    if (joules := summary.devices.joules) is not None:
        yield "Energy", format_joules(joules)


def charts_of(opened: OpenRun) -> Iterator[Chart]:
    """Those that have values."""
    measured = opened.curves.by_name.keys()
    scaled = opened.curves.scaled.items()
    known = measured | {name for name, (source, _) in scaled if source in measured}
    for chart in _all_charts(opened):
        curves = {name: label for name, label in chart.curves.items() if name in known}
        if curves:
            yield replace(chart, curves=curves)


def _all_charts(opened: OpenRun) -> Iterator[Chart]:
    summary = opened.summary
    plan = opened.reader.plan
    if summary.scores_completions:
        reward = {"reward": "training"}
        unit = "mean over completions"
        yield Chart(
            "Reward", reward, unit, evaluated="reward", best="highest", smooths=True, leads=True
        )
        yield Chart("Loss", {"loss": "loss"}, "near 0: look at the reward", smooths=True)
    else:
        loss = {"loss": "training"}
        yield Chart(
            "Loss", loss, summary.unit, evaluated="loss", best="lowest", smooths=True, leads=True
        )
    yield from _charts_of_metrics(opened)

    speed: tuple[Level, ...] = ()
    utilization: tuple[Level, ...] = ()
    if planned := planned_speed(plan):
        speed = (Level("plan", planned),)
        if planned_utilization := opened.reader.planned.utilization(planned):
            utilization = (Level("plan", 100 * planned_utilization),)
    memory = () if plan is None else (Level("plan", plan.memory.total / GIB),)
    yield Chart("Learning rate", {"learning rate": "learning rate"}, color=1)
    yield Chart(
        "Gradient norm", {"gradient norm": "gradient norm"}, "before clipping", smooths=True
    )
    yield Chart("Tokens per second", {"tokens per second": "tokens per second"}, "", speed, color=2)
    yield Chart(MFU, {MFU: MFU}, "% of the peak of the devices", utilization, color=2)
    yield Chart("Memory", {"memory": "memory"}, "GiB, peak", memory, color=3)
    for kind, unit in (("temperature", "°C"), ("power", "W")):
        prefix = f"{kind} of "
        devices = {
            name: name.removeprefix(prefix)
            for name in opened.curves.by_name
            if name.startswith(prefix) and name not in opened.curves.metrics
        }
        yield Chart(kind.capitalize(), devices, unit, of_devices=True)


def _charts_of_metrics(opened: OpenRun) -> Iterator[Chart]:
    """The charts of the report."""
    names = opened.curves.metrics
    drawn = set[str]()
    if opened.summary.scores_completions:
        rewards = mean_rewards(names)
        if len(rewards) > 1:
            yield Chart("Rewards, without their weights", rewards, "mean")
        for title, unit, group in GROUPS:
            yield Chart(title, group, unit)
            drawn |= group.keys()
        drawn |= {*DRAWN_ELSEWHERE, *(name for name in names if "rewards/" in name)}
    for title, unit, group in ROUTER_GROUPS:
        yield Chart(title, group, unit)
        drawn |= group.keys()
    if all(name in names for name in PREFERENCES):
        yield Chart("Rewards", PREFERENCES, "mean per response")
        drawn |= PREFERENCES.keys()
    for name in names:
        if name not in drawn:
            title = harmless(title_of(name))
            unit = METRIC_UNITS.get(name, "")
            yield Chart(title, {name: "training"}, unit, evaluated=name, smooths=True)


def evaluations_of(opened: OpenRun, metric: str) -> Points:
    """The loss or a metric of the validation set, by step."""
    if metric == "loss" and opened.summary.scores_completions:
        return NO_POINTS
    values = (
        (step, event.loss if metric == "loss" else event.metrics.get(metric))
        for step, event in sorted(opened.summary.evaluations.items())
    )
    known = [(step, value) for step, value in values if value is not None]
    return rounded_points(*zip(*known, strict=True)) if known else NO_POINTS
