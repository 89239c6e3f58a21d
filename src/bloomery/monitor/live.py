"""The live view of a run on a terminal, redrawn a few times a second from what the events told so far."""

import threading
import time
from pathlib import Path
from typing import final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bloomery.monitor.devices import lines
from bloomery.monitor.events import EvalDone, Event, Phase, Recovered, Resumed, RunEnded, Sampled, Saved, Warned
from bloomery.monitor.tally import RunFacts, Tally, in_millions, sparkline, thinned
from bloomery.units import format_seconds

_REDRAWS_PER_SECOND = 4
_FEED = 4  # newest lines of what happened
_SAMPLE = 300  # characters
_SAMPLE_LINES = 6


@final
class LiveView:
    """Starts drawing when it is made; `close` leaves the last picture on the screen and restores the terminal."""

    def __init__(self, facts: RunFacts, console: Console, tally: Tally | None = None) -> None:
        self._facts, self._tally = facts, tally or Tally(steps=facts.steps)
        self._feed: list[Text] = []
        self._sample: tuple[str, str] | None = None
        self._lock = threading.Lock()  # the drawing thread reads what `write` changes
        self._live = Live(
            console=console,
            get_renderable=self._picture,
            refresh_per_second=_REDRAWS_PER_SECOND,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def write(self, event: Event) -> None:
        with self._lock:
            self._tally.add(event)
            if isinstance(event, Sampled):
                text = "\n".join(event.text[:_SAMPLE].splitlines()[:_SAMPLE_LINES])
                self._sample = (event.prompt, "\n" * event.answers + text)
            told = _told(event)
            if told is not None:
                self._feed = [*self._feed, told][-_FEED:]

    def note(self, step: int, text: str) -> None:
        """A line in the feed."""
        with self._lock:
            self._feed = [*self._feed, Text(f"{step:>6}  {text}", "bold")][-_FEED:]

    def close(self) -> None:
        self._live.stop()

    def _picture(self) -> RenderableType:
        with self._lock:
            return picture(self._facts, self._tally, self._feed, self._sample, now=time.time())


def picture(
    facts: RunFacts, tally: Tally, feed: list[Text], sample: tuple[str, str] | None, *, now: float
) -> RenderableType:
    """One frame. `now` is seconds since 1970."""
    parts: list[RenderableType] = [_headline(tally, now), Text()]
    if tally.last is not None:
        parts += [_figures(facts, tally), Text()]
    parts += [Text(line) for line in lines(tally.devices.all)]
    if sample is not None:
        parts.append(Text.assemble(("sample    ", "dim"), (sample[0], "bold"), sample[1], overflow="fold"))
    parts += feed
    return Group(*parts)


def _headline(tally: Tally, now: float) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    for _ in range(4):
        row.add_column(no_wrap=True)
    phase = tally.phase
    if tally.ended is None and phase is not None and phase.name != "length":
        name, done, total = phase.name, phase.done, phase.total
    else:
        name, done, total = _state(tally), float(tally.step), float(tally.steps or 0)
    share = f"{min(done / total, 1):.0%}" if total else ""
    counts = f"{tally.step:,}/{tally.steps:,}" if tally.steps else f"{tally.step:,}"
    elapsed = format_seconds(tally.clock.until(now))
    left = f" · {format_seconds(tally.seconds_left)} left" if tally.seconds_left and not tally.ended else ""
    bar = ProgressBar(total=total or None, completed=min(done, total) if total else 0, width=30, pulse=not total)
    row.add_row(Text(f"{name:<9}", "bold"), bar, f"{share:>4}", f"step {counts} · {elapsed}{left}")
    return row


def _state(tally: Tally) -> str:
    if tally.ended is not None:
        return tally.ended.why.partition(":")[0]
    if tally.stopping:
        return "stopping"
    return "training" if tally.last else "starting"


def _figures(facts: RunFacts, tally: Tally) -> RenderableType:
    last = tally.last
    assert last is not None
    speed = tally.tokens_per_second or 0.0
    used = facts.utilisation(speed)
    limit = f" of {facts.memory_limit_gib:.1f}" if facts.memory_limit_gib else ""
    exam = tally.evaluation
    left = (
        ("loss", f"{'skipped' if last.loss is None else f'{last.loss:.4f}'}   smooth {_number(tally.smoothed, '.4f')}"),
        ("exam", "" if exam is None else _exam(exam)),
        ("rate", f"{last.learning_rate:.3e}"),
        ("gradient", _number(last.grad_norm, ".3f")),
    )
    right = (
        ("speed", f"{speed:,.0f} tokens/s" + (f" · MFU {used:.1%}" if used is not None else "")),
        ("tokens", in_millions(tally.tokens)),
        ("memory", f"{last.memory_gib:.2f}{limit} GiB"),
        ("waiting", f"{tally.data_wait or 0:.1%} of the time for data"),
    )
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True, width=8)
    table.add_column(no_wrap=True, width=42)
    table.add_column(style="dim", no_wrap=True, width=8)
    table.add_column(no_wrap=True)
    for (name, value), (other, figure) in zip(left, right, strict=True):
        table.add_row(name, value, other, figure)
    curve = Text.assemble(("curve     ", "dim"), sparkline(thinned(list(tally.losses), 60), 60))
    return Group(table, curve)


def _exam(exam: EvalDone) -> str:
    if exam.loss is None:
        return f"not finite at step {exam.step:,}"
    bits, right = exam.bits_per_byte, exam.metrics.get("accuracy")
    told = [f"{bits:.3f} bits/byte" if bits is not None else f"loss {exam.loss:.3f}"]
    told += [] if exam.perplexity is None else [f"perplexity {exam.perplexity:.4g}"]
    told += [] if right is None else [f"{right:.1%} right"]
    return f"{' · '.join(told)} at {exam.step:,}"


def _number(value: float | None, spec: str) -> str:
    return "skipped" if value is None else format(value, spec)


def _told(event: Event) -> Text | None:
    match event:
        case Warned():
            return Text(f"warning   {event.because}", "yellow")
        case Recovered():
            return Text(f"{event.step:>6}    {event.because}; {event.action}", "yellow")
        case Saved():
            return Text(
                f"{event.step:>6}    saved {Path(event.path).name}" + (", the best so far" if event.best else ""), "dim"
            )
        case Resumed():
            return Text(f"{event.step:>6}    resumed from {Path(event.path).name or 'the beginning'}", "green")
        case RunEnded() if event.why not in ("done", "stopped"):
            return Text(event.why, "bold red")
        case Phase(name="length"):
            return Text(f"length    {event.total:,.0f} steps fit into the time that was asked for", "dim")
    return None
