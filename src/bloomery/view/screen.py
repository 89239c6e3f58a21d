"""A run as one picture of text: a running job or a finished one."""

import textwrap
import time
from dataclasses import dataclass
from typing import final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Group
from rich.text import Text

from bloomery.core.text import harmless
from bloomery.core.units import format_joules, format_seconds
from bloomery.monitor.words import (
    eval_text,
    load_text,
    phase_text,
    sensor_lines,
    short_sensor_lines,
)
from bloomery.view.curves import NO_POINTS, KeptCurves, Points, RunCurves
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.plot import plot, settled_top
from bloomery.view.run_view import RunView
from bloomery.view.summary import RunSummary, Status, in_millions

_TITLE = 11  # columns
_SAMPLES = 2
# More steps than any screen shows.
SCREEN_CURVES = KeptCurves(
    frozenset({"loss", "reward", "learning rate", "tokens per second"}), "d", most_steps=20_000
)
_LEAST_ROOM = 11  # lines for the curve and the incidents, below which device lines are shortened
_ROOM_FOR_STRIPS = 16  # lines, for learning rate and speed below the curve
_SHORT = 40  # columns of a device that shares its line
_CLOCK_SECONDS = 600.0  # ETA above which the view shows the clock time of the end, too
_ASCII = str.maketrans({"█": "#", "░": "-", "·": "-", "…": "~", "°": " ", "│": "|"})


@final
@dataclass(frozen=True)
class Screen:
    """Size in characters, and whether only ASCII may be drawn. `height` None: no limit."""

    width: int
    height: int | None = None
    plain: bool = False


def view_for_screen(steps: int | None = None) -> RunView:
    """A run that has no event yet, for a picture. `steps`: of the plan."""
    return RunView(summary=RunSummary(planned_steps=steps), curves=RunCurves(SCREEN_CURVES))


def frame(
    run: RunView, planned: PlannedFigures, screen: Screen, *, state: Status, now: float
) -> list[str]:
    """The picture, no line wider than the screen. `state`: as `RunReader.read` tells it; `now`: seconds since 1970."""
    width = screen.width
    readings = run.summary.devices.newest
    head = _head(run.summary, planned, screen, state, now)
    figures = _figures(run, planned, width)
    devices = sensor_lines(readings, width)
    if screen.height is None:
        chart = _chart(run, screen, 10)
        incidents = _incidents(run, width, 16, now=now)
        samples = _samples(run, width, 8)
    else:
        # Four blank lines stand between the blocks.
        free_lines = screen.height - len(head) - len(figures) - len(devices) - 4
        if free_lines < _LEAST_ROOM and len(readings) > 2 and width >= 2 * _SHORT:
            devices = short_sensor_lines(readings, width)
            free_lines = screen.height - len(head) - len(figures) - len(devices) - 4
        wordy = bool(run.incidents) and len(run.incidents[-1].text) > 2 * width - 40
        lowest = 2 if wordy and free_lines < _LEAST_ROOM else 3
        chart = _chart(
            run,
            screen,
            max(lowest, min(12, free_lines // 2 - 3)),
            strips=free_lines >= _ROOM_FOR_STRIPS,
        )
        lines_left = max(free_lines - len(chart), 0)
        incidents = _incidents(
            run, width, min(12, max(lines_left // 2, 2)), newest=max(lines_left - 2, 2), now=now
        )
        samples = _samples(run, width, max(lines_left - len(incidents) - 1, 0))
    blocks = [head, chart, figures, devices, samples, incidents]
    fitted_lines = []
    for line in [line for block in blocks if block for line in ("", *block)][1:][: screen.height]:
        line = harmless(line).replace("\t", " ").replace("\n", " ")
        if screen.plain:
            line = line.translate(_ASCII).encode("ascii", errors="replace").decode()
        fitted_lines.append(line if cell_len(line) <= width else set_cell_size(line, width))
    return fitted_lines


def picture(
    run: RunView, planned: PlannedFigures, screen: Screen, *, state: Status, now: float
) -> Group:
    """The same for rich. No information is in the color alone; NO_COLOR removes it."""
    rows = frame(run, planned, screen, state=state, now=now)
    styles = [
        "bold" if at == 0 else "cyan" if at == 1 or "│" in row else ""
        for at, row in enumerate(rows)
    ]
    return Group(
        *(
            Text(row, style, no_wrap=True, overflow="crop")
            for row, style in zip(rows, styles, strict=True)
        )
    )


def _head(
    summary: RunSummary, planned: PlannedFigures, screen: Screen, state: Status, now: float
) -> list[str]:
    """Name, state and step in one line, or two where a name is long; then a bar with elapsed time and ETA."""
    steps = summary.planned_steps or planned.steps
    phase = summary.phase
    works = state in ("starting", "running")
    doing = ""
    if phase is not None and works and phase.name != "length":
        doing = f" · {phase_text(phase)}"
        if summary.last_step is not None and phase.total:  # before the first step the bar shows it
            doing += f" {min(phase.done / phase.total, 1.0):.0%}"
    progress = f"{state}{doing} · step {summary.step:,}" + (f" of {steps:,}" if steps else "")
    full_title = f"{planned.name} · {progress}" if planned.name else progress

    lives = works or state in ("stopping", "paused")
    times = format_seconds(
        summary.clock.until(now if lives or summary.latest_time is None else summary.latest_time)
    )
    if state == "running" and (seconds := summary.eta_seconds):
        times += f", ETA {format_seconds(seconds)}"
        if seconds > _CLOCK_SECONDS:
            end = time.localtime(now + seconds)
            today = time.localtime(now)
            times += (
                f" ({time.strftime('%H:%M' if end[:3] == today[:3] else '%a %d %b %H:%M', end)})"
            )
    progress_done = float(summary.step)
    total = float(summary.planned_steps or 0)
    if phase is not None and phase.total and not summary.last_step:
        progress_done = phase.done
        total = phase.total
    share = min(progress_done / total, 1.0) if total else 0.0
    bar_width = max(screen.width - len(times) - 8, 4)
    filled_cells = int(share * bar_width)
    bar = f"{'█' * filled_cells}{'░' * (bar_width - filled_cells)} {share:>4.0%}  {times}"
    return [
        *([full_title] if cell_len(full_title) <= screen.width else [planned.name, progress]),
        bar,
    ]


def _chart(run: RunView, screen: Screen, height: int, *, strips: bool = True) -> list[str]:
    is_scored = run.summary.scores_completions
    curve = _values(run, "reward" if is_scored else "loss")
    evals = [
        (float(step), value)
        for step, e in sorted(run.summary.evaluations.items())
        if (value := e.metrics.get("reward") if is_scored else e.loss) is not None
    ]
    top = None if is_scored else settled_top(curve)
    strip_curves = {}
    if strips:
        strip_curves = {
            "lr": _values(run, "learning rate"),
            "tokens/s": _values(run, "tokens per second"),
        }
    drawn = plot(
        curve,
        evals,
        strip_curves,
        width=screen.width,
        height=height,
        top=top,
        plain=screen.plain,
    )
    legend = f"training loss, {run.summary.unit}"
    legend += "   o validation loss" if evals else ""
    legend += f"   (first: {curve[0, 1]:.4g})" if top is not None else ""
    if is_scored:
        legend = "reward of completions" + ("   o of held-out prompts" if evals else "")
    return [legend, *drawn] if drawn else []


def _values(run: RunView, name: str) -> Points:
    curve = run.curves.by_name.get(name)
    return NO_POINTS if curve is None else curve.values_by_step()


def _figures(run: RunView, planned: PlannedFigures, width: int) -> list[str]:
    summary = run.summary
    last_step = run.summary.last_step
    if last_step is None:
        return []
    speed = summary.tokens_per_second or 0.0
    latest = summary.evaluation
    best = summary.best
    utilization = planned.utilization(speed)
    joules = summary.devices.joules
    energy_per_token = summary.joules_per_token
    loss = "skipped" if last_step.loss is None else f"{last_step.loss:.4f}"
    limit = f" of {planned.memory_limit_gib:.1f}" if planned.memory_limit_gib else ""
    energy = (
        ""
        if joules is None
        else format_joules(joules)
        + (f", {energy_per_token:.3g} J/token" if energy_per_token is not None else "")
    )
    pairs = [
        *_reward_figures(summary),
        ("loss", loss if summary.smoothed is None else f"{loss}, smoothed {summary.smoothed:.4f}"),
        (
            "speed",
            f"{speed:,.0f} tokens/s"
            + (f", MFU {utilization:.1%}" if utilization is not None else ""),
        ),
        (
            "val reward"
            if summary.scores_completions
            else "val loss"
            if latest is None or latest.bits_per_byte is None
            else "val bpb",
            "none yet" if latest is None else f"{eval_text(latest)} at step {latest.step:,}",
        ),
        (
            "best",
            "" if best is None or best == latest else f"{eval_text(best)} at step {best.step:,}",
        ),
        ("tokens", in_millions(summary.tokens)),
        ("memory", f"{last_step.memory_gib:.2f}{limit} GiB"),
        ("experts", load_text(last_step.metrics)),
        ("lr", f"{last_step.learning_rate:.3g}"),
        ("grad norm", "skipped" if last_step.grad_norm is None else f"{last_step.grad_norm:.3f}"),
        ("data wait", f"{summary.data_wait or 0:.1%} of step time"),
        ("energy", energy),
        ("checkpoint", "none yet" if run.saved is None else f"step {run.saved.step:,}"),
    ]
    half = width // 2
    rows: list[str] = []
    for cell in [f"{title:<{_TITLE}}{text}" for title, text in pairs if text]:
        # A longer cell has a line of its own.
        if rows and len(rows[-1]) < half and len(cell) <= width - half:
            rows[-1] = f"{rows[-1]:<{half}}{cell}"
        else:
            rows.append(cell)
    return rows


def _reward_figures(summary: RunSummary) -> list[tuple[str, str]]:
    """The reward and the completions of the newest rollout, and the share of time that sampling takes."""
    rollouts = [step for step in summary.recent if "reward" in step.metrics]
    if not summary.scores_completions or not rollouts or summary.reward is None:
        return []
    metrics = rollouts[-1].metrics
    reward = f"{summary.reward:.4f}"
    if summary.smoothed_reward is not None:
        reward += f", smoothed {summary.smoothed_reward:.4f}"
    mean_length = metrics.get("completions/mean_length")
    clipped = metrics.get("completions/clipped_ratio")
    length = "" if mean_length is None else f"{mean_length:,.0f} tokens"
    if length and clipped is not None:
        length += f", {clipped:.0%} not ended"
    left_out = metrics.get("prompts/left_out")
    share = summary.sampling_share
    entropy = summary.last_step.metrics.get("entropy") if summary.last_step is not None else None
    return [
        ("reward", reward),
        ("length", length),
        ("entropy", "" if entropy is None else f"{entropy:.3f} nats per token"),
        ("prompts", "" if left_out is None else f"{left_out:.0%} of the dataset left out"),
        ("rollouts", "" if share is None else f"{share:.0%} of step time"),
    ]


def _samples(run: RunView, width: int, num_lines: int) -> list[str]:
    """The first lines of the newest samples; long lines wrap, spaces unchanged."""
    lines: list[str] = []
    samples = [*run.samples][-_SAMPLES if num_lines >= _SAMPLES * 5 else -1 :]
    for sample in samples:
        sample_lines = sample.titled.expandtabs(4).splitlines()
        parts: list[str] = []
        for line in sample_lines:
            parts += [*chop_cells(line, max(width - _TITLE, 10))] or [""]
        title = f"at {sample.step:,}"
        for part in parts[: max(num_lines // len(samples), 1)]:
            lines.append(f"{title:<{_TITLE}}{part}")
            title = ""
    return lines[:num_lines]


def _incidents(
    run: RunView, width: int, num_lines: int, newest: int = 0, *, now: float
) -> list[str]:
    """The newest incidents, the newest last. With little room an incident has two lines, the newest up to `newest`."""
    lines: list[str] = []
    shown = [*run.shown_incidents()]
    today = all(time.localtime(incident.time)[:3] == time.localtime(now)[:3] for incident in shown)
    stamped, indent = ("%H:%M", 7) if today else ("%d %b %H:%M", 14)
    for incident in reversed(shown):
        max_wrapped = max(4 if num_lines >= 8 else 2, 0 if lines else newest)
        stamp = time.strftime(stamped, time.localtime(incident.time))
        wrapped = textwrap.wrap(f"step {incident.step:,}: {incident.text}", max(width - indent, 20))
        incident_lines = [
            f"{stamp if at == 0 else '':<{indent}}{line}"
            for at, line in enumerate(wrapped[:max_wrapped])
        ]
        if len(wrapped) > max_wrapped:
            incident_lines[-1] = incident_lines[-1][: width - 1] + "…"
        if lines and len(lines) + len(incident_lines) > num_lines:
            break
        lines = incident_lines + lines
    return lines
