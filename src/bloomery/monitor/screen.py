"""A run as one picture of text: a running job or a finished one."""

import textwrap
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np
from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Group
from rich.text import Text

from bloomery.core.text import harmless
from bloomery.core.units import format_seconds
from bloomery.monitor.events import (
    Event,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    as_shown,
)
from bloomery.monitor.summary import BARS, RunFacts, RunSummary, in_millions
from bloomery.monitor.words import (
    device_lines,
    eval_text,
    format_joules,
    incident_text,
    short_device_lines,
)

Point = tuple[float, float]
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of U+2800, by column and row
_LABEL = 9  # columns of the scale


def plot(
    line: Sequence[Point],
    marks: Sequence[Point],
    strips: Mapping[str, Sequence[Point]] | None = None,
    *,
    width: int,
    height: int,
    top: float | None = None,
    plain: bool = False,
) -> list[str]:
    """`height` rows of at most `width` columns with a scale on the left, one with the first and the last step, then one
    of bars from zero for each of `strips`, over the same steps.

    `line` is drawn as the mean of each interval, `marks` as `o`. Values above `top` are drawn at the upper edge.
    `plain`: ASCII only. Empty without two points.
    """
    columns = width - _LABEL - 1
    across = [x for x, _ in (*line, *marks)]
    if len(line) < 2 or columns < 10 or height < 2:
        return []
    first = min(across)
    last = max(across)
    span = max(last - first, 1e-9)

    def means(points: Sequence[Point], intervals: int) -> np.ndarray:
        """One value per interval; an empty one is interpolated, or NaN at the ends."""
        x, y = np.array(points, dtype=float).T
        at = np.minimum(((x - first) / span * intervals).astype(int), intervals - 1)
        counts = np.bincount(at, minlength=intervals)
        known = counts.nonzero()[0]
        values = np.bincount(at, weights=y, minlength=intervals)[known] / counts[known]
        return np.interp(np.arange(intervals), known, values, left=np.nan, right=np.nan)

    curve = means(line, columns * (1 if plain else 2))
    heights = [*curve[~np.isnan(curve)].tolist(), *(y for _, y in marks)]
    low = min(heights)
    high = max(heights)
    high = high if top is None else min(max(top, low), high)
    room = (high - low) or abs(high) * 0.1 or 1.0

    # The cells between two adjacent columns are filled, so that the line has no gap.
    fine = height * (1 if plain else 4)
    bits = [[0] * columns for _ in range(height)]
    before: int | None = None
    for at, value in enumerate(curve.tolist()):
        if value != value:
            continue
        level = min(int((value - low) / room * fine), fine - 1)
        start = level if before is None else before + (level > before) - (level < before)
        for up in range(min(start, level), max(start, level) + 1):
            down = fine - 1 - up
            if plain:
                bits[down][at] = ord("*")
            else:
                bits[down // 4][at // 2] |= 0x2800 | _DOTS[at % 2][down % 4]
        before = level
    for x, y in marks:
        row = height - 1 - min(int((y - low) / room * height), height - 1)
        bits[row][min(int((x - first) / span * columns), columns - 1)] = ord("o")

    scale = {
        0: high,
        height // 2: low + room * (height - 1 - height // 2) / max(height - 1, 1),
        height - 1: low,
    }
    rows = [
        f"{f'{scale[at]:.4g}' if at in scale else '':>{_LABEL - 1}} {'|' if plain else '│'}"
        + "".join(chr(cell or 32) for cell in row).rstrip()
        for at, row in enumerate(bits)
    ]
    start_step = f"{first:,.0f}"
    end_step = f"{last:,.0f}"
    rows.append(f"{'step':>{_LABEL - 1}}  {start_step}{end_step:>{columns - len(start_step)}}")
    levels = " .:-=+*#" if plain else BARS
    for name, points in (strips or {}).items():
        if points:
            values = means(points, columns)
            most = float(np.nanmax(values))
            shares = values * ((len(levels) - 1) / most if most > 0 else 0.0)
            bars = "".join(
                " " if share != share else levels[max(round(share), 0)] for share in shares.tolist()
            )
            rows.append(f"{name:>{_LABEL - 1}}  {bars}".rstrip())
    return rows


def settled_top(line: Sequence[Point]) -> float | None:
    """The maximum after the first tenth of a curve, if drawing that tenth would flatten the rest; else None."""
    start = len(line) // 10
    if start < 10:
        return None
    rest = [y for _, y in line[start:]]
    low = min(y for _, y in line)
    high = max(y for _, y in line)
    return max(rest) if max(rest) - low < 0.6 * (high - low) else None


_TITLE = 11  # columns
_KEPT = 200  # incidents
_SAMPLES = 2
_POINTS = 20_000  # of a curve that are kept: more than any screen shows
_LEAST_ROOM = 11  # lines for the curve and the incidents, below which device lines are shortened
_ROOM_FOR_STRIPS = 16  # lines, for learning rate and speed below the curve
_SHORT = 40  # columns of a device that shares its line
_CLOCK_SECONDS = 600.0  # ETA above which the view shows the clock time of the end, too
_ASCII = str.maketrans({"█": "#", "░": "-", "·": "-", "…": "~", "°": " ", "│": "|"})


@final
@dataclass
class WatchedRun:
    """Mutable: the state of a run after the events that `add` was given."""

    summary: RunSummary = field(default_factory=RunSummary)
    curve: list[Point] = field(default_factory=list)  # losses
    rates: list[Point] = field(default_factory=list)
    speeds: list[Point] = field(default_factory=list)
    incidents: deque[tuple[Event, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    samples: deque[Sampled] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    saved: Saved | None = None
    _open: bool = False  # it has steps and no RunEnded after them

    def add(self, event: Event) -> None:
        event = as_shown(event)
        if isinstance(event, RunStarted | Resumed) and self._open:
            self.incidents.append(
                (replace(event, step=self.summary.step), "killed (SIGKILL, crash or power loss)")
            )
            self._open = False
        self.summary.add(event)
        match event:
            case StepDone():
                self._open = True
                figures = (event.loss, event.learning_rate, event.tokens_per_second)
                for points, value in zip(
                    (self.curve, self.rates, self.speeds), figures, strict=True
                ):
                    if value is not None:
                        points.append((float(event.step), value))
                    if len(points) > _POINTS:
                        del points[1::2]
            case Resumed() | Recovered():  # later steps are discarded
                for points in (self.curve, self.rates, self.speeds):
                    points[:] = [point for point in points if point[0] <= event.step]
                # Of an error that the run has left behind, the first line is enough.
                self.incidents = deque(
                    ((at, text.partition("\n")[0]) for at, text in self.incidents), _KEPT
                )
            case Sampled():
                self.samples.append(event)
            case Saved():
                self.saved = event
            case RunEnded():
                self._open = False
        text = incident_text(event)
        if text is not None and not isinstance(event, Saved):
            self.incidents.append((event, text))

    def restart(self) -> None:
        """A new process resumes the run: the end of the previous one is no longer its state."""
        self.summary.ended = None
        self.summary.stopping = False
        self.summary.phase = None
        self.summary.recent.clear()
        self.incidents.clear()

    @property
    def state(self) -> str:
        """starting, running, stopping, or the status of RunEnded."""
        if self.summary.ended is not None:
            return self.summary.ended.status
        if self.summary.stopping:
            return "stopping"
        return "running" if self.summary.recent else "starting"


@final
@dataclass(frozen=True)
class Screen:
    """Size in characters, and whether only ASCII may be drawn. `height` None: no limit."""

    width: int
    height: int | None = None
    plain: bool = False


def frame(run: WatchedRun, facts: RunFacts, screen: Screen, *, state: str, now: float) -> list[str]:
    """The picture, no line wider than the screen. `state`: as in `bloomery watch --json`; `now`: seconds since 1970."""
    width = screen.width
    all_devices = run.summary.devices.all
    head = _head(run.summary, facts, screen, state, now)
    figures = _figures(run, facts, width)
    devices = device_lines(all_devices, width)
    if screen.height is None:
        chart = _chart(run, screen, 10)
        incidents = _incidents(run, width, 16, now=now)
        samples = _samples(run, width, 8)
    else:
        # one of them between blocks
        room = screen.height - len(head) - len(figures) - len(devices) - 4
        if room < _LEAST_ROOM and len(all_devices) > 2 and width >= 2 * _SHORT:
            devices = short_device_lines(all_devices, width)
            room = screen.height - len(head) - len(figures) - len(devices) - 4
        wordy = bool(run.incidents) and len(run.incidents[-1][1]) > 2 * width - 40
        lowest = 2 if wordy and room < _LEAST_ROOM else 3
        chart = _chart(
            run, screen, max(lowest, min(12, room // 2 - 3)), strips=room >= _ROOM_FOR_STRIPS
        )
        left = max(room - len(chart), 0)
        incidents = _incidents(
            run, width, min(12, max(left // 2, 2)), newest=max(left - 2, 2), now=now
        )
        samples = _samples(run, width, max(left - len(incidents) - 1, 0))
    blocks = [head, chart, figures, devices, samples, incidents]
    shown = []
    for line in [line for block in blocks if block for line in ("", *block)][1:][: screen.height]:
        line = harmless(line).replace("\t", " ").replace("\n", " ")
        if screen.plain:
            line = line.translate(_ASCII).encode("ascii", errors="replace").decode()
        shown.append(line if cell_len(line) <= width else set_cell_size(line, width))
    return shown


def picture(run: WatchedRun, facts: RunFacts, screen: Screen, *, state: str, now: float) -> Group:
    """The same for rich. No information is in the color alone; NO_COLOR removes it."""
    rows = frame(run, facts, screen, state=state, now=now)
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
    summary: RunSummary, facts: RunFacts, screen: Screen, state: str, now: float
) -> list[str]:
    """Name, state and step in one line, or two where a name is long; then a bar with elapsed time and ETA."""
    steps = summary.steps or facts.steps
    phase = summary.phase
    works = state in ("starting", "running")
    doing = f" · {phase.name}" if phase is not None and works and phase.name != "length" else ""
    progress = f"{state}{doing} · step {summary.step:,}" + (f" of {steps:,}" if steps else "")
    whole = f"{facts.name} · {progress}" if facts.name else progress

    lives = works or state in ("stopping", "paused")
    times = format_seconds(
        summary.clock.until(now if lives or summary.latest is None else summary.latest)
    )
    if state == "running" and (seconds := summary.eta_seconds):
        times += f", ETA {format_seconds(seconds)}"
        if seconds > _CLOCK_SECONDS:
            end = time.localtime(now + seconds)
            today = time.localtime(now)
            times += (
                f" ({time.strftime('%H:%M' if end[:3] == today[:3] else '%a %d %b %H:%M', end)})"
            )
    done = float(summary.step)
    total = float(summary.steps or 0)
    if phase is not None and phase.total and not summary.last:
        done = phase.done
        total = phase.total
    share = min(done / total, 1.0) if total else 0.0
    room = max(screen.width - len(times) - 8, 4)
    full = int(share * room)
    bar = f"{'█' * full}{'░' * (room - full)} {share:>4.0%}  {times}"
    return [*([whole] if cell_len(whole) <= screen.width else [facts.name, progress]), bar]


def _chart(run: WatchedRun, screen: Screen, height: int, *, strips: bool = True) -> list[str]:
    evals = [
        (float(step), e.loss)
        for step, e in sorted(run.summary.evaluations.items())
        if e.loss is not None
    ]
    top = settled_top(run.curve)
    below = {"lr": run.rates, "tokens/s": run.speeds} if strips else {}
    drawn = plot(
        run.curve, evals, below, width=screen.width, height=height, top=top, plain=screen.plain
    )
    legend = f"training loss, {run.summary.unit}"
    legend += "   o validation loss" if evals else ""
    legend += f"   (first: {run.curve[0][1]:.4g})" if top is not None else ""
    return [legend, *drawn] if drawn else []


def _figures(run: WatchedRun, facts: RunFacts, width: int) -> list[str]:
    summary = run.summary
    last = run.summary.last
    if last is None:
        return []
    speed = summary.tokens_per_second or 0.0
    latest = summary.evaluation
    best = summary.best
    used = facts.utilization(speed)
    joules = summary.devices.joules
    each = summary.joules_per_token
    loss = "skipped" if last.loss is None else f"{last.loss:.4f}"
    limit = f" of {facts.memory_limit_gib:.1f}" if facts.memory_limit_gib else ""
    energy = (
        ""
        if joules is None
        else format_joules(joules) + (f", {each:.3g} J/token" if each is not None else "")
    )
    pairs = [
        ("loss", loss if summary.smoothed is None else f"{loss}, smoothed {summary.smoothed:.4f}"),
        ("speed", f"{speed:,.0f} tokens/s" + (f", MFU {used:.1%}" if used is not None else "")),
        (
            "val loss" if latest is None or latest.bits_per_byte is None else "val bpb",
            "none yet" if latest is None else f"{eval_text(latest)} at step {latest.step:,}",
        ),
        (
            "best",
            "" if best is None or best == latest else f"{eval_text(best)} at step {best.step:,}",
        ),
        ("tokens", in_millions(summary.tokens)),
        ("memory", f"{last.memory_gib:.2f}{limit} GiB"),
        ("lr", f"{last.learning_rate:.3g}"),
        ("grad norm", "skipped" if last.grad_norm is None else f"{last.grad_norm:.3f}"),
        ("data wait", f"{summary.data_wait or 0:.1%} of step time"),
        ("energy", energy),
        ("checkpoint", "none yet" if run.saved is None else f"step {run.saved.step:,}"),
    ]
    half = width // 2
    rows: list[str] = []
    for cell in [f"{title:<{_TITLE}}{text}" for title, text in pairs if text]:
        # a longer cell has a line of its own
        if rows and len(rows[-1]) < half and len(cell) <= width - half:
            rows[-1] = f"{rows[-1]:<{half}}{cell}"
        else:
            rows.append(cell)
    return rows


def _samples(run: WatchedRun, width: int, room: int) -> list[str]:
    """The first lines of the newest samples; long lines wrap, spaces unchanged."""
    found: list[str] = []
    shown = [*run.samples] if room >= _SAMPLES * 5 else [*run.samples][-1:]
    for sample in shown:
        whole = sample.whole.expandtabs(4).splitlines()
        text = [
            part for line in whole for part in [*chop_cells(line, max(width - _TITLE, 10))] or [""]
        ]
        found += [
            f"{f'at {sample.step:,}' if at == 0 else '':<{_TITLE}}{line}"
            for at, line in enumerate(text[: max(room // len(shown), 1)])
        ]
    return found[:room]


def _incidents(run: WatchedRun, width: int, room: int, newest: int = 0, *, now: float) -> list[str]:
    """The newest incidents, the newest last. With little room an incident has two lines, the newest up to `newest`."""
    found: list[str] = []
    today = all(
        time.localtime(event.time)[:3] == time.localtime(now)[:3] for event, _ in run.incidents
    )
    stamped, indent = ("%H:%M", 7) if today else ("%d %b %H:%M", 14)
    for event, text in reversed(run.incidents):
        most = max(4 if room >= 8 else 2, 0 if found else newest)
        stamp = time.strftime(stamped, time.localtime(event.time))
        wrapped = textwrap.wrap(f"step {event.step:,}: {text}", max(width - indent, 20))
        shown = [
            f"{stamp if at == 0 else '':<{indent}}{line}" for at, line in enumerate(wrapped[:most])
        ]
        if len(wrapped) > most:
            shown[-1] = shown[-1][: width - 1] + "…"
        if found and len(found) + len(shown) > room:
            break
        found = shown + found
    return found
