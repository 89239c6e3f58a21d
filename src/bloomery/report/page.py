"""Content of the page about a run; run.html is its template."""

from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from statistics import fmean
from typing import Any

from markupsafe import Markup

from bloomery.core.errors import UserError
from bloomery.core.units import (
    GIB,
    JOULES_IN_KWH,
    format_bytes,
    format_count,
    format_joules,
    format_seconds,
)
from bloomery.data.pictures.thumbnails import shown_thumbnail
from bloomery.hardware.profile import build_profile
from bloomery.monitor.events import CPU_DEVICE, DeviceStats, TaskDone
from bloomery.monitor.words import figure, number_format_of, with_interval
from bloomery.plan.advise import claims_of, energy_kwh
from bloomery.report.charts import (
    SIGNS,
    Bars,
    Intervals,
    Plot,
    Point,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    render,
)
from bloomery.report.experts import OF_ROUTERS, expert_charts
from bloomery.report.record import RunRecord, measured_claims, read_run_record
from bloomery.report.rewards import (
    METRIC_UNITS,
    PREFERENCES,
    metric_points,
    reward_charts,
    reward_series,
    shown_completions,
    title_of,
)
from bloomery.view.plot import plot
from bloomery.view.summary import MEASURABLE_TOKENS, in_millions

_LEGEND = {
    "kill": "killed or failed",
    "resume": "resumed",
    "skip": "step skipped",
    "rewind": "back to a checkpoint",
    "save": "checkpoint",
}
_SHOWN_SAMPLES = 24  # steps whose samples are on the page
_SHOWN_INCIDENTS = 200
_DRAWN = 8  # devices with a color in charts


def page(
    record: RunRecord,
    extras: Sequence[Bars],
    name: str,
) -> str:
    """The HTML document. `name`: of the run; `extras`: charts at the top."""
    summary = record.summary
    started = record.started
    of_steps = f" of {summary.planned_steps:,}" if summary.planned_steps else ""
    lead = [f"{summary.step:,}{of_steps} steps"]
    if started is not None:
        parameters = f"{format_count(started.parameters)} parameters"
        if started.trainable is not None:
            parameters += f" ({format_count(started.trainable)} trainable)"
        lead.append(f"{parameters} on {started.device}")
    lead += _of_rewards(record)

    # The commands that continue this run and that repeat it, from the folder that holds runs/.
    folder = record.folder
    run_path = Path("runs", folder.name) if folder.parent.name == "runs" else Path(folder.name)
    quoted_path = quote(str(run_path))
    commands = f"bloomery train {quoted_path}/recipe.yaml --run-dir {quoted_path}-again"
    if record.state != "done":
        commands = f"bloomery resume {quote(name)}\n{commands}"

    mark_kinds = {mark.kind for mark in record.marks}
    completions = shown_completions(folder)
    planned_claims = None
    if record.plan and record.machine:
        planned_claims = claims_of(record.plan, record.expected, record.machine)
    return render(
        "run.html",
        name=name,
        written=f"Written by Bloomery {started.version if started else '?'} from the events of this run.",
        record=record,
        lead=lead,
        cards=_cards(record),
        extras=[bar_chart(bars) for bars in extras],
        loss=_main_chart(record),
        legend_of_marks=" · ".join(
            f"{sign} {_LEGEND[kind]}" for kind, sign in SIGNS.items() if kind in mark_kinds
        ),
        charts=[*_metrics(record), *(_speed(record) if record.steps else [])],
        experts=expert_charts(record),
        devices=_devices(record) if record.device_samples else None,
        memory=_memory(record),
        compared=[
            (title, _short(planned), _short(measured), f"{measured / planned - 1:+.0%}")
            for title, planned, measured in planned_and_measured(record)
            if planned and measured
        ],
        incidents=[
            (f"{i.step:,}", format_seconds(i.seconds), i.kind, i.text)
            for i in record.incidents[-_SHOWN_INCIDENTS:]
        ],
        evaluations=_evaluations(record),
        tasks=[
            interval_chart(_intervals(event)) for event in record.tasks if event.value is not None
        ],
        completions=completions,
        shows_pictures=any(one.pictures for _, shown in completions for one in shown),
        **_samples(record),
        measured=measured_claims(record),
        planned=planned_claims,
        machine=_machine(record),
        again=commands,
    )


def _of_rewards(record: RunRecord) -> list[str]:
    """What a reader must know before the curve of a reward: a control, and what the model could do before training."""
    lines = []
    control = getattr(record.plan.objective, "reward_control", "none") if record.plan else "none"
    if control != "none":
        lines.append(f"a control: trained on {control} rewards, the curve has the real ones")
    before = next((event for event in record.evals if event.step == 0), None)
    if before is not None and (reward := before.metrics.get("reward")) is not None:
        lines.append(f"held-out reward before training {reward:.3f}")
    return lines


def _main_chart(record: RunRecord) -> Markup:
    """The loss, or the reward of a run that is judged by it."""
    if record.summary.scores_completions:
        series = _rewards(record)
        return line_chart("Reward", series, record.marks, unit="mean over completions", height=300)
    return line_chart("Loss", _losses(record), record.marks, unit=record.summary.unit, height=300)


def _rewards(record: RunRecord) -> list[Series]:
    return reward_series(record, smooth(metric_points(record.steps, "reward")))


def _losses(record: RunRecord) -> list[Series]:
    raw: list[Point] = [(step.step, step.loss) for step in record.steps if step.loss is not None]
    validation: list[Point] = [
        (event.step, event.loss) for event in record.evals if event.loss is not None
    ]
    return [
        Series("training loss, each step", raw, "raw"),
        Series("training loss, smoothed", smooth(raw), "line"),
        Series("validation loss", validation, "eval"),
    ]


def loss_plot(folder: Path) -> Plot:
    """The loss chart of a run. Raises UserError when it has no step yet."""
    record = read_run_record(folder)
    is_scored = record.summary.scores_completions
    series = _rewards(record) if is_scored else _losses(record)
    raw, _, validation = series
    if not raw.points:
        raise UserError(
            "the run has no loss yet", where=str(folder), fix="plot after the first step"
        )
    unit = "reward" if is_scored else record.summary.unit
    svg = line_chart(folder.name, series, record.marks, unit=unit, height=300, shape="image")
    legend = f"training loss, {unit}" + ("   o validation loss" if validation.points else "")
    if is_scored:
        legend = "reward of completions" + ("   o held-out prompts" if validation.points else "")
    return Plot(
        str(svg), "\n".join([legend, *plot(raw.points, validation.points, width=80, height=12)])
    )


def _cards(record: RunRecord) -> list[tuple[str, str]]:
    """Figures and their captions; an unknown figure is empty."""
    summary = record.summary
    best = summary.best
    joules = summary.devices.joules
    joules_per_token = summary.joules_per_token
    step_seconds = [step.step_seconds for step in record.steps]
    compile_seconds = summary.compile_seconds

    # Of the best evaluation; the number of tokens where they are too few to rely on.
    bits = None
    loss = None
    accuracy = None
    perplexity = None
    few = ""
    if best is not None:
        few = f", on {best.tokens:,} loss tokens" if best.tokens < MEASURABLE_TOKENS else ""
        bits = best.bits_per_byte
        loss = best.loss
        accuracy = best.metrics.get("accuracy")
        perplexity = best.perplexity
    last_reward = None
    if summary.scores_completions:
        # The loss is minus the reward of held-out prompts, and stays near 0 in training.
        loss = None
        last_reward = summary.smoothed_reward
    held_out_reward = None if best is None else best.metrics.get("reward")
    share = summary.sampling_share
    return [
        (
            figure(held_out_reward, ".3f", ""),
            f"reward of held-out prompts, step {best.step if best else 0:,}",
        ),
        (figure(last_reward, ".3f", ""), "reward in training, smoothed"),
        (
            figure(loss, ".3f", ""),
            f"validation loss, {summary.unit}, step {best.step if best else 0:,}{few}",
        ),
        (figure(bits, ".3f", ""), "bits per byte, validation set"),
        (figure(accuracy, ".1%", ""), "accuracy, validation set"),
        (_short(perplexity), "perplexity, validation set"),
        (
            "" if summary.scores_completions else figure(summary.smoothed, ".3f", ""),
            f"training loss, {summary.unit}",
        ),
        (figure(share, ".0%", ""), "of step time is sampling and rewards"),
        (in_millions(summary.tokens) if summary.tokens else "", "tokens"),
        (format_seconds(summary.training_seconds), "training time"),
        (figure(record.tokens_per_second or None, ",.0f", ""), "tokens per second"),
        (figure(fmean(step_seconds) if step_seconds else None, ".3g", " s"), "per step"),
        ("" if compile_seconds is None else format_seconds(compile_seconds), "compile time"),
        (
            format_seconds(max(summary.resume_seconds)) if summary.resume_seconds else "",
            "to resume",
        ),
        (figure(record.utilization, ".1%", ""), "MFU"),
        (figure(summary.peak_gib or None, ".2f", " GiB"), "peak memory"),
        (
            "" if joules is None else format_joules(joules),
            f"energy, {joules_per_token:.3g} J per token" if joules_per_token else "energy",
        ),
    ]


def _intervals(event: TaskDone) -> Intervals:
    """One metric of a task; with the other model of a comparison, and the difference as a note."""
    spec = number_format_of(event.metric)
    note = f"{event.items:,} items, step {event.step:,}"
    rows = [("this run", event.value or 0.0, event.low, event.high)]
    if event.against_value is not None and event.difference is not None:
        rows.append((event.against, event.against_value, event.against_low, event.against_high))
        difference = with_interval(
            event.difference, event.difference_low, event.difference_high, f"+{spec}"
        )
        note += f"; difference {difference}"
        note += "" if event.p_value is None else f", p = {event.p_value:.2g} ({event.test})"
    return Intervals(f"{event.task}: {event.metric}", rows, spec.endswith("%"), note)


def smooth(points: Sequence[Point]) -> list[Point]:
    """Moving average over a fortieth of the run, forward and backward, so that the curve has no lag."""
    share = 1 / min(max(len(points) / 40, 3), 200)

    def averages(values: Sequence[float]) -> list[float]:
        mean = 0.0
        weight = 0.0
        means = []
        for value in values:
            mean = mean + share * (value - mean)
            weight = weight + share * (1 - weight)
            means.append(mean / weight)
        return means

    values = [value for _, value in points]
    forward_means = averages(values)
    backward_means = reversed(averages(values[::-1]))
    return [
        (step, (forward + backward) / 2)
        for (step, _), forward, backward in zip(points, forward_means, backward_means, strict=True)
    ]


def _metrics(record: RunRecord) -> list[Markup]:
    """A chart per metric of the objective (accuracy, margin, KL), in training (smoothed) and on the validation set."""
    metrics = [*(step.metrics for step in record.steps), *(event.metrics for event in record.evals)]
    names = dict.fromkeys(name for metric_values in metrics for name in metric_values)

    def smoothed(name: str) -> list[Point]:
        return smooth(
            [(step.step, step.metrics[name]) for step in record.steps if name in step.metrics]
        )

    charts: list[Markup] = []
    # The section on experts has those of routers.
    names = {name: None for name in names if not name.startswith(OF_ROUTERS)}
    if record.summary.scores_completions:
        charts, drawn = reward_charts(record)
        losses = [Series("each step", _losses(record)[0].points)]
        charts.append(line_chart("Loss", losses, unit="near 0: look at the reward"))
        names = {name: None for name in names if name not in drawn}
    if all(name in names for name in PREFERENCES):
        rewards = [
            Series(f"{title}, training", smoothed(name), f"d{number}")
            for number, (name, title) in enumerate(PREFERENCES.items())
        ]
        charts.append(line_chart("Rewards", rewards, unit="mean per response"))
    for name in names:
        if name not in PREFERENCES:
            points: list[Point] = [
                (event.step, event.metrics[name]) for event in record.evals if name in event.metrics
            ]
            series = [Series("training", smoothed(name)), Series("validation set", points, "eval")]
            unit = METRIC_UNITS.get(name, "")
            charts.append(line_chart(title_of(name), series, unit=unit))
    return charts


def _speed(record: RunRecord) -> list[Markup]:
    steps = record.steps
    norms: list[Point] = [(s.step, s.grad_norm) for s in steps if s.grad_norm is not None]
    waiting = [
        (s.step, 100 * s.data_wait_seconds / s.step_seconds) for s in steps if s.step_seconds > 0
    ]
    return [
        line_chart(
            "Learning rate",
            [Series("rate", [(s.step, s.learning_rate) for s in steps])],
            from_zero=True,
        ),
        line_chart("Gradient norm", [Series("norm", norms)], unit="L2 norm before clipping"),
        line_chart(
            "Throughput",
            [Series("speed", [(s.step, s.tokens_per_second) for s in steps])],
            unit="tokens/s",
        ),
        line_chart(
            "Waiting for data", [Series("share", waiting)], unit="% of step time", from_zero=True
        ),
    ]


def _devices(record: RunRecord) -> dict[str, Any]:
    """One line per device over time, and a table of utilization, temperature, power, energy and memory."""
    began = record.summary.began or 0.0
    usage = record.summary.devices

    def points(device: int, value: Callable[[DeviceStats], float | None]) -> list[Point]:
        samples = ((s.time, value(s)) for s in record.device_samples if s.device == device)
        return [((when - began) / 60, y) for when, y in samples if y is not None]

    def curve(title: str, unit: str, name: str, *, from_zero: bool = False) -> Markup | None:
        """A line per device; None when no device has that sensor."""
        lines = []
        for number, device in enumerate(usage.all[:_DRAWN]):
            measured = points(
                device.latest.device,
                lambda sample: getattr(sample, name) if sample.seconds else None,
            )
            if measured:
                lines.append(Series(device.name, measured, f"d{number}"))
        if not lines:
            return None
        return line_chart(title, lines, unit=unit, from_zero=from_zero, across="minute")

    charts = [
        curve("Utilization", "%", "utilization", from_zero=True),
        curve("Temperature", "°C", "temperature"),
        curve("Power", "W", "power", from_zero=True),
        curve("Clock", "MHz", "clock_mhz"),
        curve("Memory in use", "GiB", "memory_gib", from_zero=True),
    ]
    # Only the training process knows what PyTorch's allocator holds.
    allocator_device = next(
        (sample.device for sample in record.device_samples if sample.reserved_gib is not None), None
    )
    if allocator_device is not None:
        lines = [
            Series("reserved", points(allocator_device, lambda s: s.reserved_gib), "d0"),
            Series("allocated", points(allocator_device, lambda s: s.allocated_gib), "d1"),
        ]
        charts.append(
            line_chart("Memory of PyTorch", lines, unit="GiB", from_zero=True, across="minute")
        )

    # A column that no device fills is left out.
    columns = [
        "mean utilization",
        "max temperature",
        "mean power",
        "energy",
        "peak memory",
        "throttled",
    ]
    rows = []
    for device in usage.all:
        latest = device.latest
        throttled = device.throttled_seconds.items()
        cells = [
            figure(device.mean_utilization, ".0f", "%"),
            figure(device.peak_temperature, ".0f", " °C"),
            figure(device.mean_power, ",.0f", " W")
            if latest.shared_with is None
            else f"with GPU {latest.shared_with}",
            format_joules(device.joules) if device.power_seconds else "",
            figure(device.peak_gib, ".1f", " GiB"),
            ", ".join(f"{format_seconds(seconds)} ({reason})" for reason, seconds in throttled)
            or ("never" if latest.throttled is not None else ""),
        ]
        rows.append(((device.name, latest.name), cells))
    filled = [column for column in range(len(columns)) if any(cells[column] for _, cells in rows)]

    # What the energy covers depends on the sensors that could be read.
    energy = _energy(record)
    with_plan = any(plan for *_, plan in energy)
    are_cpus = {device.latest.device == CPU_DEVICE for device in usage.all if device.power_seconds}
    with_both = len(are_cpus) == 2
    source = "GPUs and CPU" if with_both else "the CPU" if True in are_cpus else "the GPUs"
    share = usage.covered_seconds / record.summary.seconds if record.summary.seconds else 1.0
    return {
        "charts": [chart for chart in charts if chart is not None],
        "head": ["", *(columns[column] for column in filled)],
        "rows": [(device, [cells[column] for column in filled]) for device, cells in rows],
        "energy_head": ["", "measured", "planned"] if with_plan else ["", "measured"],
        "energy": energy if with_plan else [row[:2] for row in energy],
        "energy_of": "" if usage.joules is None else source,
        "covered": "" if 0.95 <= share <= 1.05 else f"{share:.0%}",
        "shown": f"{_DRAWN} of {len(usage.all)}" if len(usage.all) > _DRAWN else "",
    }


def _energy(record: RunRecord) -> list[tuple[str, str, str]]:
    """Energy of the run and per token, measured and planned; empty without power measurements."""
    summary = record.summary
    plan = record.plan
    kwh = energy_kwh(plan, build_profile(record.machine)) if plan and record.machine else None
    planned = kwh * JOULES_IN_KWH if kwh else None
    joules = summary.devices.joules
    joules_per_token = summary.joules_per_token
    if joules is None:
        return []
    rows = [
        (
            "energy",
            format_joules(joules),
            format_joules(planned) if planned and record.state == "done" else "",
        )
    ]
    if joules_per_token is not None:
        total = plan.total_tokens if plan else None
        planned_per_token = planned / total if planned and total else None
        rows.append(
            ("per token", f"{joules_per_token:.3g} J", figure(planned_per_token, ".3g", " J"))
        )
        rows.append(
            (
                "per million tokens",
                format_joules(joules_per_token * 1e6),
                format_joules(planned_per_token * 1e6) if planned_per_token else "",
            )
        )
    return rows


def _memory(record: RunRecord) -> Markup | None:
    plan = record.plan
    peak = record.summary.peak_gib
    if plan is None:
        return None
    unit, name = (GIB, "GiB") if plan.memory.total >= GIB else (GIB / 1024, "MiB")
    parts = sorted(
        ((purpose, size / unit) for purpose, size in plan.memory.parts.items()),
        key=lambda part: -part[1],
    )
    rows = [
        *parts,
        ("planned total", plan.memory.total / unit),
        *([("measured peak", peak * GIB / unit)] if peak else []),
    ]
    low, high, limit = (
        format_bytes(size) for size in (plan.memory.low, plan.memory.high, plan.memory.limit)
    )
    note = f"Planned range {low} to {high}, limit {limit}."
    return bar_chart(Bars("Memory per device", rows, name, note, highlighted="measured peak"))


def planned_and_measured(record: RunRecord) -> list[tuple[str, float | None, float | None]]:
    """Title with unit, planned value, measured value."""
    plan = record.plan
    summary = record.summary
    if plan is None:
        return []
    step = plan.step_seconds.value if plan.step_seconds else None
    measured_step = fmean(done.step_seconds for done in record.steps) if record.steps else None
    # The time of a whole run compares with nothing before its end, here as on the terminal.
    planned_seconds = plan.seconds.value if plan.seconds and record.state == "done" else None
    communication = plan.parallel.layout.communication_seconds if plan.parallel else {}
    return [
        ("seconds per step", step, measured_step),
        *(
            (
                f"seconds of communication per step, {axis}",
                seconds,
                fmean(done.communication_seconds.get(axis, 0.0) for done in record.steps)
                if record.steps
                else None,
            )
            for axis, seconds in communication.items()
        ),
        (
            "tokens per second",
            plan.trained_tokens_per_step / step if step else None,
            record.tokens_per_second,
        ),
        ("training time, s", planned_seconds, summary.training_seconds),
        ("peak memory, GiB", plan.memory.total / GIB, summary.peak_gib),
    ]


def _short(value: float | None) -> str:
    return figure(value, ",.0f" if abs(value or 0) >= 1000 else ".4g", "")


def _evaluations(record: RunRecord) -> dict[str, list[Any]]:
    best = record.summary.best
    names = list(dict.fromkeys(name for event in record.evals for name in event.metrics))
    is_scored = record.summary.scores_completions
    per_token = any(event.perplexity is not None for event in record.evals)
    rows = [
        [
            f"{event.step:,}" + (" (best)" if best and event.step == best.step else ""),
            *([] if is_scored else ["not finite" if event.loss is None else f"{event.loss:.4f}"]),
            *(
                [_short(event.perplexity), figure(event.bits_per_byte, ".3f", "")]
                if per_token
                else []
            ),
            *(figure(event.metrics.get(name), ".4f", "") for name in names),
            f"{event.tokens:,}",
            format_seconds(event.seconds),
        ]
        for event in record.evals
    ]
    heads = [
        "step",
        *([] if is_scored else [f"validation loss, {record.summary.unit}"]),
        *(["perplexity", "bits per byte"] if per_token else []),
    ]
    return {
        "head": [*heads, *(name.replace("_", " ") for name in names), "tokens", "time"],
        "rows": rows,
    }


def _samples(record: RunRecord) -> dict[str, Any]:
    """The newest first; of many steps the first and the newest."""
    steps = sorted({sample.step for sample in record.samples})
    shown = (
        steps if len(steps) <= _SHOWN_SAMPLES else sorted({steps[0], *steps[1 - _SHOWN_SAMPLES :]})
    )
    left_out = len(steps) - len(shown)
    return {
        "samples": [
            (f"step {at:,}", [s for s in record.samples if s.step == at]) for at in reversed(shown)
        ],
        # Once on the page, however many steps show it.
        "sample_images": {
            place: image
            for place in dict.fromkeys(s.image for s in record.samples if s.step in shown)
            if (image := shown_thumbnail(record.folder, place)) is not None
        },
        "samples_left_out": f"{left_out:,}" if left_out else "",
    }


def _machine(record: RunRecord) -> list[tuple[str, str]]:
    machine = record.machine
    if machine is None:
        return []
    host = machine.host
    software = machine.software
    cores = (
        f"{host.cpu_cores} cores ({', '.join(host.cpu_flags)})"
        if host.cpu_flags
        else f"{host.cpu_cores} cores"
    )
    return [
        ("CPU", f"{host.cpu_name}, {cores}"),
        (
            "memory",
            f"{format_bytes(host.memory_bytes)}, {format_bytes(host.memory_free_bytes)} free at the start",
        ),
        *(
            (f"GPU {at}", f"{gpu.name} · {gpu.arch} · {format_bytes(gpu.usable_bytes)}")
            for at, gpu in enumerate(machine.accelerators)
        ),
        ("system", f"{host.system}, Python {software.python}"),
        ("PyTorch", " ".join(filter(None, [software.torch or "none", software.build]))),
        *software.environment.items(),
    ]
