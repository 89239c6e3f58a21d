"""What the page about a run shows, from the headline to the command that repeats the run; its template lays it out."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from markupsafe import Markup

from bloomery.core.units import GIB, format_bytes, format_count, format_seconds
from bloomery.hardware.profile import build_profile
from bloomery.monitor.console.words import figure, format_joules
from bloomery.monitor.events import CPU_DEVICE, DeviceStats
from bloomery.monitor.summary import JOULES_IN_KWH, in_millions
from bloomery.plan.advice.advise import claims_of, energy_kwh
from bloomery.report.charts import SIGNS, Bars, Point, Series, bar_chart, line_chart
from bloomery.report.heldout import ANSWERS_NOTE, LEGEND, Answered, HeldOut, level
from bloomery.report.record import Record, judge_run
from bloomery.report.render import render

_HAPPENED = {
    "kill": "killed or failed", "resume": "resumed", "skip": "step skipped", "rewind": "rewound", "save": "saved",
}  # fmt: skip
_SHOWN_SAMPLES = 24  # checkpoints whose samples are on the page
_SHOWN_INCIDENTS = 200
_REWARDS = {"chosen_reward": "chosen", "rejected_reward": "rejected"}  # one chart: what matters is their distance
_METRIC_UNITS = {
    "accuracy": "share of pairs with the chosen answer ahead", "margin": "chosen reward - rejected reward",
    "kl": "nats", "nats": "nats per token", "log_odds": "log odds ratio",
}  # fmt: skip
_DRAWN = 8  # devices that a chart has colours for
_TOGETHER = 1.05  # of the run's time: a little more is rounding
_LOWEST = 0.95


def page(
    record: Record, held_out: HeldOut | str, extras: Sequence[Bars], name: str, answers: Sequence[Answered] = ()
) -> str:
    """The whole document. `held_out` may be the reason why there is none."""
    summary, started = record.summary, record.started
    lead = [f"{summary.step:,} of {summary.steps:,} steps" if summary.steps else f"{summary.step:,} steps"]
    if started is not None:
        some = "" if started.trainable is None else f", {format_count(started.trainable)} of them trained,"
        lead.append(f"{format_count(started.parameters)} parameters{some} on {started.device}")
    raw: list[Point] = [(step.step, step.loss) for step in record.steps if step.loss is not None]
    held: list[Point] = [(event.step, event.loss) for event in record.evals if event.loss is not None]
    curves = [
        Series("each step", raw, "raw"),
        Series("smoothed", smooth(raw), "line"),
        Series("held out", held, "eval"),
    ]
    kinds = {mark.kind for mark in record.marks}
    columns = "before training", "after training", "reference"
    ran = judge_run(record)
    planned = claims_of(record.plan, record.expected, record.machine) if record.plan and record.machine else None
    folder = record.folder
    shown = quote(str(Path("runs", folder.name)) if folder.parent.name == "runs" else folder.name)  # as one types it
    resume = f"bloomery resume {quote(name)}\n" if record.state != "done" else ""
    return render(
        "run.html",
        name=name,
        written=f"Written by Bloomery {started.version if started else '?'} from this run's events.",
        record=record,
        lead=lead,
        cards=_cards(record),
        extras=[bar_chart(bars) for bars in extras],
        loss=line_chart("Loss", curves, record.marks, unit=summary.unit, height=300),
        happened=" · ".join(f"{sign} {_HAPPENED[kind]}" for kind, sign in SIGNS.items() if kind in kinds),
        metrics=_metrics(record),
        speed=_speed(record) if record.steps else [],
        devices=_devices(record) if record.device_samples else None,
        memory=_memory(record),
        compared=[
            (title, _short(said), _short(did), f"{did / said - 1:+.0%}")
            for title, said, did in compared(record)
            if said and did
        ],
        repeated=_repeated(record),
        incidents=[
            (f"{i.step:,}", format_seconds(i.seconds), i.kind, i.text) for i in record.incidents[-_SHOWN_INCIDENTS:]
        ],
        evaluations=_evaluations(record),
        **_samples(record),
        asked=[
            (one.question, list(zip(columns, (one.before, one.after, one.reference), strict=True))) for one in answers
        ],
        answers_note=ANSWERS_NOTE,
        held_out=held_out,
        after_step="" if isinstance(held_out, str) else f"after step {held_out.step:,}",
        legend=LEGEND,
        level=level,
        ran=ran,
        planned=planned,
        machine=_machine(record),
        again=f"{resume}bloomery train {shown}/recipe.yaml --run-dir {shown}-again",
    )


def _cards(record: Record) -> list[tuple[str, str]]:
    """Figures and their titles; what is not known is empty."""
    summary, best, speed = record.summary, record.summary.best, record.tokens_per_second
    joules, each = summary.devices.joules, summary.joules_per_token
    energy = "" if joules is None else format_joules(joules)
    bits, loss, right, perplexity = None, None, None, None
    if best is not None:
        bits, loss, right, perplexity = best.bits_per_byte, best.loss, best.metrics.get("accuracy"), best.perplexity
    return [
        (figure(bits, ".3f", ""), f"bits per byte, held out, step {best.step if best else 0:,}"),
        (figure(loss, ".3f", ""), f"{loss_name(summary.loss_unit)}, held out"),
        (figure(right, ".1%", ""), "of them right, held out"),
        (figure(perplexity, ".4g", ""), "perplexity, held out"),
        (figure(summary.smoothed, ".3f", ""), "training loss, smoothed"),
        (in_millions(summary.tokens) if summary.tokens else "", "tokens"),
        (format_seconds(summary.seconds), "that it was worked on"),
        (figure(speed or None, ",.0f", ""), "tokens a second"),
        (figure(record.utilization, ".1%", ""), "of the device's peak (MFU)"),
        (figure(summary.peak_gib or None, ".2f", " GiB"), "memory at the peak"),
        (energy, f"energy, {each:.3g} J a token" if each else "energy"),
    ]


def loss_name(per: str) -> str:
    return "nats per token" if per == "token" else f"loss a {per}"


def smooth(points: Sequence[Point]) -> list[Point]:
    """A bias-corrected moving average over a fortieth of the run: short enough to follow it, long enough to be calm."""
    share = 1 / min(max(len(points) / 40, 3), 200)
    mean, weight, found = 0.0, 0.0, []
    for step, value in points:
        mean += share * (value - mean)
        weight += share * (1 - weight)
        found.append((step, mean / weight))
    return found


def _metrics(record: Record) -> list[Markup]:
    """A chart for each figure of the objective (accuracy, margin, KL), training smoothed and held out."""
    told = [*(step.metrics for step in record.steps), *(event.metrics for event in record.evals)]
    names = dict.fromkeys(name for figures in told for name in figures)

    def ran(name: str) -> list[Point]:
        return smooth([(step.step, step.metrics[name]) for step in record.steps if name in step.metrics])

    charts = []
    if all(name in names for name in _REWARDS):
        both = [
            Series(f"{_REWARDS[name]}, training, smoothed", ran(name), f"d{at}") for at, name in enumerate(_REWARDS)
        ]
        charts.append(line_chart("Rewards", both, unit="mean per answer"))
    for name in names:
        if name not in _REWARDS:
            held: list[Point] = [(event.step, event.metrics[name]) for event in record.evals if name in event.metrics]
            series = [Series("training, smoothed", ran(name)), Series("held out", held, "eval")]
            title, unit = name.replace("_", " ").capitalize(), _METRIC_UNITS.get(name, "")
            charts.append(line_chart(title, series, unit=unit))
    return charts


def _speed(record: Record) -> list[Markup]:
    steps = record.steps
    norms: list[Point] = [(s.step, s.grad_norm) for s in steps if s.grad_norm is not None]
    wait = [(s.step, 100 * s.data_wait_seconds / s.step_seconds) for s in steps if s.step_seconds > 0]
    return [
        line_chart("Learning rate", [Series("rate", [(s.step, s.learning_rate) for s in steps])], from_zero=True),
        line_chart("Gradient norm", [Series("norm", norms)]),
        line_chart("Speed", [Series("speed", [(s.step, s.tokens_per_second) for s in steps])], unit="tokens/s"),
        line_chart("Waiting for data", [Series("share", wait)], unit="% of the step", from_zero=True),
    ]


def _devices(record: Record) -> dict[str, Any]:
    """A line a device over the minutes of the run; load, heat, power and energy of each; what the figures hold."""
    began, known = record.summary.began or 0.0, record.summary.devices

    def points(device: int, value: Callable[[DeviceStats], float | None]) -> list[Point]:
        told = ((s.time, s.seconds, value(s)) for s in record.device_samples if s.device == device)
        return [((when - began) / 60, y) for when, _, y in told if y is not None]

    def curve(title: str, unit: str, name: str, *, from_zero: bool = False) -> Markup | None:
        series = [
            Series(
                device.name, points(device.latest.device, lambda s: getattr(s, name) if s.seconds else None), f"d{at}"
            )
            for at, device in enumerate(known.all[:_DRAWN])
        ]
        drawn = [one for one in series if one.points]
        return line_chart(title, drawn, unit=unit, from_zero=from_zero, across="minute") if drawn else None

    charts = [
        curve("Load", "%", "utilization", from_zero=True),
        curve("Temperature", "°C", "temperature"),
        curve("Power", "W", "power", from_zero=True),
        curve("Clock", "MHz", "clock_mhz"),
        curve("Memory in use", "GiB", "memory_gib", from_zero=True),
    ]
    held = next((sample.device for sample in record.device_samples if sample.reserved_gib is not None), None)
    if held is not None:  # by the allocator of the training process
        both = [
            Series("held by PyTorch", points(held, lambda s: s.reserved_gib), "d0"),
            Series("used by tensors", points(held, lambda s: s.allocated_gib), "d1"),
        ]
        charts.append(line_chart("PyTorch's memory", both, unit="GiB", from_zero=True, across="minute"))

    head, rows = ["load", "hottest", "power", "energy", "memory, peak", "slowed down"], []
    for device in known.all:
        now, slowed = device.latest, device.throttled_seconds.items()
        cells = [
            figure(device.mean_utilization, ".0f", "%"),
            figure(device.peak_temperature, ".0f", " °C"),
            figure(device.mean_power, ",.0f", " W") if now.shared_with is None else f"with GPU {now.shared_with}",
            format_joules(device.joules) if device.power_seconds else "",
            figure(device.peak_gib, ".1f", " GiB"),
            ", ".join(f"{format_seconds(seconds)} ({reason})" for reason, seconds in slowed)
            or ("never" if now.throttled is not None else ""),
        ]
        rows.append(((device.name, now.name), cells))
    told = [at for at in range(len(head)) if any(cells[at] for _, cells in rows)]
    energy = _energy(record)
    with_plan = any(plan for *_, plan in energy)
    return {
        "charts": [chart for chart in charts if chart is not None],
        "head": ["", *(head[at] for at in told)],
        "rows": [(who, [cells[at] for at in told]) for who, cells in rows],
        "energy_head": ["", "run", "plan"] if with_plan else ["", "run"],
        "energy": energy if with_plan else [row[:2] for row in energy],
        "notes": _device_notes(record),
    }


def _energy(record: Record) -> list[tuple[str, str, str]]:
    """What the run used, a token's share of it, and what the plan had said; nothing where no power was told."""
    summary, plan = record.summary, record.plan
    energy = energy_kwh(plan, build_profile(record.machine)) if plan and record.machine else None
    planned = energy * JOULES_IN_KWH if energy else None
    joules, each = summary.devices.joules, summary.joules_per_token
    if joules is None:
        return []
    rows = [("energy", format_joules(joules), format_joules(planned) if planned and record.state == "done" else "")]
    if each is not None:
        total = plan.total_tokens if plan else None
        said = planned / total if planned and total else None
        rows.append(("of a token", f"{each:.3g} J", figure(said, ".3g", " J")))
        rows.append(("of a million tokens", format_joules(each * 1e6), format_joules(said * 1e6) if said else ""))
    return rows


def _device_notes(record: Record) -> list[str]:
    """What the figures hold, and what they do not."""
    known, told = record.summary.devices, ["Load and power are means over the run."]
    if known.joules is None:
        told.append(
            "Nothing here tells its power, so there is no energy: on most systems only root reads a processor's."
        )
    else:
        parts = {d.latest.device == CPU_DEVICE for d in known.all if d.power_seconds}
        what = "boards and processor" if len(parts) == 2 else "the processor" if True in parts else "the boards"
        told.append(f"Energy is that of {what} as their sensors tell it; the rest of the machine is not in it.")
        share = known.covered_seconds / record.summary.seconds if record.summary.seconds else 1.0
        if not _LOWEST <= share <= _TOGETHER:
            told.append(f"Power was told for {share:.0%} of the time between the first event and the last.")
    if len(known.all) > _DRAWN:
        told.append(f"The curves show {_DRAWN} of {len(known.all)} devices.")
    return told


def _memory(record: Record) -> Markup | None:
    plan, peak = record.plan, record.summary.peak_gib
    if plan is None:
        return None
    unit, name = (GIB, "GiB") if plan.memory.total >= GIB else (GIB / 1024, "MiB")
    parts = sorted(((each, size / unit) for each, size in plan.memory.parts.items()), key=lambda part: -part[1])
    rows = [*parts, ("planned in all", plan.memory.total / unit), *([("measured", peak * GIB / unit)] if peak else [])]
    low, high, limit = (format_bytes(size) for size in (plan.memory.low, plan.memory.high, plan.memory.limit))
    said = f"Range {low} to {high}, limit {limit}."
    return bar_chart(Bars("Memory of one device", rows, name, said, own="measured"))


def compared(record: Record) -> list[tuple[str, float | None, float | None]]:
    """Title with its unit, what the plan said, what the run did."""
    plan, summary = record.plan, record.summary
    if plan is None:
        return []
    step = plan.step_seconds.value if plan.step_seconds else None
    ran = fmean(done.step_seconds for done in record.steps) if record.steps else None
    whole = plan.seconds.value if plan.seconds and record.state == "done" else None  # as the terminal has it
    return [
        ("seconds a step", step, ran),
        ("tokens/s", plan.train.tokens_per_step / step if step else None, record.tokens_per_second),
        ("seconds in all", whole, summary.seconds),
        ("GiB at the peak", plan.memory.total / GIB, summary.peak_gib),
    ]


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _repeated(record: Record) -> str:
    again = record.repeated
    if again is None:
        return ""
    which = f"Steps {again.first:,} to {again.last:,} were computed once more after a resume: "
    if not again.different:
        return which + "every loss and gradient norm the same to the last bit."
    which += f"{again.different:,} of {again.steps:,} differ."
    if record.plan is not None and not record.plan.train.deterministic:
        which += " Data order, random numbers and states were the same: equal up to kernel rounding."
    return which


def _evaluations(record: Record) -> dict[str, list[Any]]:
    best = record.summary.best
    names = list(dict.fromkeys(name for event in record.evals for name in event.metrics))
    priced = any(event.perplexity is not None for event in record.evals)  # the loss of a pair is no price of a token
    rows = [
        [
            f"{event.step:,}" + (" best" if best and event.step == best.step else ""),
            "not finite" if event.loss is None else f"{event.loss:.4f}",
            *([figure(event.perplexity, ".4g", ""), figure(event.bits_per_byte, ".4g", "")] if priced else []),
            *(figure(event.metrics.get(name), ".4f", "") for name in names),
            f"{event.tokens:,}",
            format_seconds(event.seconds),
        ]
        for event in record.evals
    ]
    heads = ["step", loss_name(record.summary.loss_unit), *(["perplexity", "bits per byte"] if priced else [])]
    return {"head": [*heads, *(name.replace("_", " ") for name in names), "tokens", "took"], "rows": rows}


def _samples(record: Record) -> dict[str, Any]:
    """The newest first; of many steps the first and the last ones."""
    steps = sorted({sample.step for sample in record.samples})
    shown = steps if len(steps) <= _SHOWN_SAMPLES else sorted({steps[0], *steps[1 - _SHOWN_SAMPLES :]})
    left_out = len(steps) - len(shown)
    return {
        "samples": [(f"step {at:,}", [s for s in record.samples if s.step == at]) for at in reversed(shown)],
        "samples_left_out": f"{left_out:,}" if left_out else "",
    }


def _machine(record: Record) -> list[tuple[str, str]]:
    found = record.machine
    if found is None:
        return []
    host, software = found.host, found.software
    cores = f"{host.cpu_cores} cores ({', '.join(host.cpu_flags)})" if host.cpu_flags else f"{host.cpu_cores} cores"
    return [
        ("processor", f"{host.cpu_name}, {cores}"),
        ("memory", f"{format_bytes(host.memory_bytes)}, {format_bytes(host.memory_free_bytes)} free at the start"),
        *(
            (f"GPU {at}", f"{gpu.name} · {gpu.arch} · {format_bytes(gpu.usable_bytes)}")
            for at, gpu in enumerate(found.accelerators)
        ),
        ("system", f"{host.system}, Python {software.python}"),
        ("PyTorch", " ".join(filter(None, [software.torch or "none", software.build]))),
        *software.environment.items(),
    ]
