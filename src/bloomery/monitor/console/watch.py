"""A run as one picture of text, for whoever looks at it from outside: while it goes on or long after."""

import itertools
import statistics
import textwrap
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Group
from rich.text import Text

from bloomery.core.text import harmless
from bloomery.core.units import format_seconds
from bloomery.monitor.devices import format_joules, lines, short_lines
from bloomery.monitor.events import (
    EvalDone,
    Event,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Warned,
    as_shown,
)
from bloomery.monitor.tally import BARS, RunFacts, Tally, in_millions

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

    `line` is drawn as the mean of each stretch, `marks` as `o`. What is above `top` touches the upper edge. `plain`:
    ASCII alone. Empty without two points.
    """
    columns, across = width - _LABEL - 1, [x for x, _ in (*line, *marks)]
    if len(line) < 2 or columns < 10 or height < 2:
        return []
    first, last = min(across), max(across)
    span = max(last - first, 1e-9)
    fine = columns * (1 if plain else 2)
    means = _means(line, first, span, fine)
    heights = [y for y in means if y is not None] + [y for _, y in marks]
    low, high = min(heights), max(heights)
    high = high if top is None else min(max(top, low), high)
    room = (high - low) or abs(high) * 0.1 or 1.0
    cells = _drawn(means, low, room, columns, height, plain)
    for x, y in marks:
        row = height - 1 - min(int((y - low) / room * height), height - 1)
        cells[row][min(int((x - first) / span * columns), columns - 1)] = "o"
    scale = {0: high, height // 2: low + room * (height - 1 - height // 2) / max(height - 1, 1), height - 1: low}
    bar = "|" if plain else "│"
    rows = [
        f"{f'{scale[at]:.4g}' if at in scale else '':>{_LABEL - 1}} {bar}{''.join(row)}".rstrip()
        for at, row in enumerate(cells)
    ]
    ends = f"{first:,.0f}", f"{last:,.0f}"
    below = [
        f"{name:>{_LABEL - 1}}  {_bars(_means(points, first, span, columns), plain)}".rstrip()
        for name, points in (strips or {}).items()
        if points
    ]
    return [*rows, f"{'step':>{_LABEL - 1}}  {ends[0]}{ends[1]:>{columns - len(ends[0])}}", *below]


def settled_top(line: Sequence[Point]) -> float | None:
    """The height below which a curve stays after its first tenth, where that part would leave the rest flat."""
    start = len(line) // 10
    if start < 10:
        return None
    rest = [y for _, y in line[start:]]
    low, high = min(y for _, y in line), max(y for _, y in line)
    return max(rest) if max(rest) - low < 0.6 * (high - low) else None


def _bars(means: Sequence[float | None], plain: bool) -> str:
    """One column a value, from zero."""
    levels = " .:-=+*#" if plain else BARS
    high = max((y for y in means if y is not None), default=0.0)
    scale = (len(levels) - 1) / high if high > 0 else 0.0
    return "".join(" " if y is None else levels[max(round(y * scale), 0)] for y in means)


def _means(line: Sequence[Point], first: float, span: float, columns: int) -> list[float | None]:
    """One value a column; a column without a point lies on the way between its neighbours."""
    stretches: list[list[float]] = [[] for _ in range(columns)]
    for x, y in line:
        stretches[min(int((x - first) / span * columns), columns - 1)].append(y)
    means = [statistics.fmean(stretch) if stretch else None for stretch in stretches]
    known = [at for at, mean in enumerate(means) if mean is not None]
    for left, right in itertools.pairwise(known):
        start, end = means[left], means[right]
        assert start is not None and end is not None
        for at in range(left + 1, right):
            means[at] = start + (end - start) * (at - left) / (right - left)
    return means


def _drawn(
    means: Sequence[float | None], low: float, room: float, columns: int, height: int, plain: bool
) -> list[list[str]]:
    """Rows of cells, the highest first. What lies between two neighbouring columns is filled: the line holds."""
    fine = height * (1 if plain else 4)
    levels = [None if y is None else min(int((y - low) / room * fine), fine - 1) for y in means]
    bits = [[0] * columns for _ in range(height)]
    before: int | None = None
    for at, level in enumerate(levels):
        if level is None:
            continue
        start = level if before is None else before + (level > before) - (level < before)
        for y in range(min(start, level), max(start, level) + 1):
            down = fine - 1 - y
            if plain:
                bits[down][at] = 1
            else:
                bits[down // 4][at // 2] |= _DOTS[at % 2][down % 4]
        before = level
    if plain:
        return [["*" if bit else " " for bit in row] for row in bits]
    return [[chr(0x2800 + bit) if bit else " " for bit in row] for row in bits]


_TITLE = 11  # columns
_KEPT = 200  # incidents
_SAMPLES = 2
_POINTS = 20_000  # of a curve that are kept: more than any screen shows
_LEAST_ROOM = 11  # lines for the curve and what happened, below which other things are shortened
_ROOM_FOR_STRIPS = 16  # of rate and speed below the curve
_SHORT = 40  # columns of a device that shares its line
_CLOCK_SECONDS = 600.0  # left, from which on the time of the end is told, too


@final
@dataclass
class Seen:
    """Mutable: what a watcher knows of a run after the events that `add` was given."""

    tally: Tally = field(default_factory=Tally)
    curve: list[Point] = field(default_factory=list)  # losses
    rates: list[Point] = field(default_factory=list)
    speeds: list[Point] = field(default_factory=list)
    incidents: deque[tuple[Event, str]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    samples: deque[Sampled] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    saved: Saved | None = None
    started: RunStarted | None = None
    _open: bool = False  # steps were told and no end of them

    def add(self, event: Event) -> None:
        event = as_shown(event)
        if isinstance(event, RunStarted | Resumed) and self._open:
            self.incidents.append((replace(event, step=self.tally.step), "killed, without a word"))
            self._open = False
        self.tally.add(event)
        match event:
            case StepDone():
                self._open = True
                self._step(event)
            case RunStarted():
                self.started = event
            case Sampled():
                self.samples.append(event)
            case Saved():
                self.saved = event
            case Resumed():
                self._back_to(event.step)
                source = Path(event.path).name if event.path else "the beginning"
                self.incidents.append((event, f"resumed from {source} in {format_seconds(event.seconds)}"))
            case Recovered():
                self._back_to(event.step)
                self.incidents.append((event, f"{event.because}; {event.action}"))
            case Warned():
                self.incidents.append((event, event.because))
            case RunEnded():
                self._open = False
                self.incidents.append((event, event.why))
            case Phase(name="paused"):
                self.incidents.append((event, "training waits"))
            case Phase(name="stopping"):
                self.incidents.append((event, "asked to stop: it saves after this step"))

    def begin_again(self) -> None:
        """Another process goes on: how the one before it ended is history, and no state of this one."""
        self.tally.ended, self.tally.stopping, self.tally.phase = None, False, None
        self.tally.recent.clear()
        self.incidents.clear()

    @property
    def state(self) -> str:
        """What the run does, as far as its events tell."""
        if self.tally.ended is not None:
            return self.tally.ended.why.partition(":")[0]
        if self.tally.stopping:
            return "stopping"
        return "running" if self.tally.recent else "starting"

    def _step(self, event: StepDone) -> None:
        self.rates = _longer(self.rates, event.step, event.learning_rate)
        self.speeds = _longer(self.speeds, event.step, event.tokens_per_second)
        if event.loss is None:
            self.incidents.append((event, "loss or gradient was not finite: the step was skipped"))
        else:
            self.curve = _longer(self.curve, event.step, event.loss)

    def _back_to(self, step: int) -> None:
        """What came after it is given up."""
        self.curve, self.rates, self.speeds = (
            [point for point in points if point[0] <= step] for points in (self.curve, self.rates, self.speeds)
        )


def _longer(points: list[Point], step: int, value: float) -> list[Point]:
    points.append((float(step), value))
    return points[::2] if len(points) > _POINTS else points


@final
@dataclass(frozen=True)
class Screen:
    """How much room there is, and whether only ASCII may be drawn. `height` None: as long as it takes."""

    width: int
    height: int | None = None
    plain: bool = False


def frame(seen: Seen, facts: RunFacts, screen: Screen, *, state: str, now: float) -> list[str]:
    """The picture, no line wider than the screen. `state`: what the run does; `now`: seconds since 1970."""
    head = [*_headline(seen, facts, screen, state), _bar(seen.tally, screen, _times(seen.tally, state, now))]
    figures, all_devices = _figures(seen, facts, screen.width), seen.tally.devices.all
    devices = lines(all_devices, screen.width)
    if screen.height is None:
        chart, happened = _chart(seen, screen, 10), _happened(seen, screen.width, 16, now=now)
        samples = _samples(seen, screen.width, 8)
    else:
        room = screen.height - len(head) - len(figures) - len(devices) - 4  # one of them between blocks
        if room < _LEAST_ROOM and len(all_devices) > 2 and screen.width >= 2 * _SHORT:
            devices = short_lines(all_devices, screen.width)
            room = screen.height - len(head) - len(figures) - len(devices) - 4
        wordy = bool(seen.incidents) and len(seen.incidents[-1][1]) > 2 * screen.width - 40
        lowest = 2 if wordy and room < _LEAST_ROOM else 3
        chart = _chart(seen, screen, max(lowest, min(12, room // 2 - 3)), strips=room >= _ROOM_FOR_STRIPS)
        left = max(room - len(chart), 0)
        happened = _happened(seen, screen.width, min(12, max(left // 2, 2)), newest=max(left - 2, 2), now=now)
        samples = _samples(seen, screen.width, max(left - len(happened) - 1, 0))
    blocks = [head, chart, figures, devices, samples, happened]
    told = [line for block in blocks if block for line in ("", *block)][1:]
    return [_cut(_ascii(line) if screen.plain else line, screen.width) for line in told[: screen.height]]


def _headline(seen: Seen, facts: RunFacts, screen: Screen, state: str) -> list[str]:
    """One line, or two where a name is long."""
    tally = seen.tally
    steps = tally.steps or facts.steps
    phase = tally.phase
    works = state in ("starting", "running")
    doing = f" · {phase.name}" if phase is not None and works and phase.name != "length" else ""
    told = f"{state}{doing} · step {tally.step:,}" + (f" of {steps:,}" if steps else "")
    whole = f"{facts.name} · {told}" if facts.name else told
    return [whole] if cell_len(whole) <= screen.width else [facts.name, told]


def _times(tally: Tally, state: str, now: float) -> str:
    """Gone and left."""
    lives = state in ("starting", "running", "stopping", "paused")
    end = now if lives or tally.latest is None else tally.latest
    return format_seconds(tally.clock.until(end)) + (_left(tally, now) if state == "running" else "")


def _left(tally: Tally, now: float) -> str:
    """What remains, and by the clock where one would have to count."""
    seconds = tally.seconds_left
    if not seconds:
        return ""
    end, today = time.localtime(now + seconds), time.localtime(now)
    clock = time.strftime("%H:%M" if end[:3] == today[:3] else "%a %d %b %H:%M", end)
    return f", {format_seconds(seconds)} left" + (f", until {clock}" if seconds > _CLOCK_SECONDS else "")


def _bar(tally: Tally, screen: Screen, times: str) -> str:
    phase = tally.phase
    done, total = float(tally.step), float(tally.steps or 0)
    if phase is not None and phase.total and not tally.last:
        done, total = phase.done, phase.total
    share = min(done / total, 1.0) if total else 0.0
    room = max(screen.width - len(times) - 8, 4)
    full = int(share * room)
    return f"{'█' * full}{'░' * (room - full)} {share:>4.0%}  {times}"


def _chart(seen: Seen, screen: Screen, height: int, *, strips: bool = True) -> list[str]:
    exams = [(float(step), told.loss) for step, told in sorted(seen.tally.evaluations.items()) if told.loss is not None]
    top, below = settled_top(seen.curve), {"rate": seen.rates, "tokens/s": seen.speeds} if strips else {}
    drawn = plot(seen.curve, exams, below, width=screen.width, height=height, top=top, plain=screen.plain)
    legend = f"loss, {seen.tally.unit}"
    legend += "   o exam on held-out text" if exams else ""
    legend += f"   (it began at {seen.curve[0][1]:.4g})" if top is not None else ""
    return [legend, *drawn] if drawn else []


def _figures(seen: Seen, facts: RunFacts, width: int) -> list[str]:
    tally, last = seen.tally, seen.tally.last
    if last is None:
        return []
    speed, exam, best = tally.tokens_per_second or 0.0, tally.evaluation, tally.best
    used = facts.utilisation(speed)
    loss = "skipped" if last.loss is None else f"{last.loss:.4f}"
    pairs = [
        ("loss", loss if tally.smoothed is None else f"{loss}, smoothed {tally.smoothed:.4f}"),
        ("speed", f"{speed:,.0f} tokens/s" + (f", MFU {used:.1%}" if used is not None else "")),
        ("exam", "none yet" if exam is None else f"{_score(exam, tally.per)} at {exam.step:,}"),
        ("best", "" if best is None or best == exam else f"{_score(best, tally.per)} at {best.step:,}"),
        ("tokens", in_millions(tally.tokens)),
        (
            "memory",
            f"{last.memory_gib:.2f}" + (f" of {facts.memory_limit_gib:.1f}" if facts.memory_limit_gib else "") + " GiB",
        ),
        ("rate", f"{last.learning_rate:.3g}"),
        ("gradient", "skipped" if last.grad_norm is None else f"{last.grad_norm:.3f}"),
        ("data", f"{tally.data_wait or 0:.1%} of the time waited for"),
        ("energy", _energy(tally)),
        ("saved", "nothing yet" if seen.saved is None else f"step {seen.saved.step:,}"),
    ]
    half = width // 2
    rows: list[str] = []
    for cell in [f"{title:<{_TITLE}}{text}" for title, text in pairs if text]:
        if rows and len(rows[-1]) < half and len(cell) <= width - half:  # what needs more has a line of its own
            rows[-1] = f"{rows[-1]:<{half}}{cell}"
        else:
            rows.append(cell)
    return rows


def _score(exam: EvalDone, per: str) -> str:
    if exam.bits_per_byte is not None:
        return f"{exam.bits_per_byte:.3f} bits/byte"
    right = exam.metrics.get("accuracy")
    told = f"{exam.loss:.3f} nats" if per == "token" else f"{exam.loss:.3f}"
    return "not finite" if exam.loss is None else told + ("" if right is None else f", {right:.1%} right")


def _energy(tally: Tally) -> str:
    joules, each = tally.devices.joules, tally.joules_per_token
    if joules is None:
        return ""
    return format_joules(joules) + (f", {each:.3g} J/token" if each is not None else "")


def _samples(seen: Seen, width: int, room: int) -> list[str]:
    """The beginnings of the newest samples; long lines go on in the next."""
    found: list[str] = []
    told = [*seen.samples] if room >= _SAMPLES * 5 else [*seen.samples][-1:]
    for sample in told:
        text = [part for line in sample.whole.expandtabs(4).splitlines() for part in _folded(line, width - _TITLE)]
        found += [
            f"{f'at {sample.step:,}' if at == 0 else '':<{_TITLE}}{line}"
            for at, line in enumerate(text[: max(room // len(told), 1)])
        ]
    return found[:room]


def _folded(line: str, width: int) -> list[str]:
    """A line as pieces of so many columns, its blanks kept."""
    return [*chop_cells(line, max(width, 10))] or [""]


def _happened(seen: Seen, width: int, room: int, newest: int = 0, *, now: float) -> list[str]:
    """The newest incidents, the newest last; where it is narrow, each in two lines, that one in up to `newest`."""
    found: list[str] = []
    today = all(time.localtime(event.time)[:3] == time.localtime(now)[:3] for event, _ in seen.incidents)
    stamped, indent = ("%H:%M", 7) if today else ("%d %b %H:%M", 14)
    for event, text in reversed(seen.incidents):
        most = max(4 if room >= 8 else 2, 0 if found else newest)
        stamp = time.strftime(stamped, time.localtime(event.time))
        wrapped = textwrap.wrap(f"step {event.step:,}: {text}", max(width - indent, 20))
        told = [f"{stamp if at == 0 else '':<{indent}}{line}" for at, line in enumerate(wrapped[:most])]
        if len(wrapped) > most:
            told[-1] = told[-1][: width - 1] + "…"
        if found and len(found) + len(told) > room:
            break
        found = told + found
    return found


def styled(rows: Iterable[str]) -> Group:
    """A picture for rich. Colour is an ornament: nothing is told by it alone, and NO_COLOR takes it away."""

    def style(at: int, row: str) -> str:
        return "bold" if at == 0 else "cyan" if at == 1 or "│" in row else ""

    return Group(*(Text(row, style(at, row), no_wrap=True, overflow="crop") for at, row in enumerate(rows)))


_ASCII = str.maketrans({"█": "#", "░": "-", "·": "-", "…": "~", "°": " ", "│": "|"})


def _ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", errors="replace").decode()


def _cut(line: str, width: int) -> str:
    """To so many columns, and one line."""
    line = harmless(line).replace("\t", " ").replace("\n", " ")
    return line if cell_len(line) <= width else set_cell_size(line, width)
