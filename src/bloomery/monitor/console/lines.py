"""What the parent process shows of a run while it reads its events: plain lines, or a live view on a terminal."""

import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol, final

from rich.console import Console, RenderableType
from rich.live import Live

from bloomery.core.text import harmless
from bloomery.core.units import format_seconds
from bloomery.monitor.console.watch import Screen, Seen, frame, styled
from bloomery.monitor.events import (
    EvalDone,
    Event,
    GpuSampled,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepDone,
    Vitals,
    Warned,
    as_shown,
)
from bloomery.monitor.sinks import Sink
from bloomery.monitor.tally import RunFacts, Tally, in_millions, sparkline

WIDTH = 100
_INDENT = 11
_BARS = 11
_SAMPLE_LINES = 6
_REDRAWS_PER_SECOND = 2
_PHASE_SECONDS = 10.0  # between two lines of one phase
_PHASE_WORDS = {
    "stopping": "a checkpoint is written after this step, then the run ends",
    "paused": "training waits",
}
_EXAM, _NARROW_EXAM = 17, 13  # columns of an exam; the narrow one makes room for a column of memory


def header(per: str = "token", *, memory: bool = False) -> str:
    """The titles of the columns. `per`: what the loss is about."""
    wide, exam = (_NARROW_EXAM, "bits/byte") if memory else (_EXAM, "exam, bits/byte")
    exam = {"token": exam, "label": "exam"}.get(per, "exam, right")  # labels beside a teacher: none is right or wrong
    titles = f"{'step':>6}{'tokens':>11}{'loss':>9}{exam:>{wide}}{'tokens/s':>11}{'left':>9}"
    return titles + (f"{'GiB':>7}" if memory else "")


HEADER = header()


class View(Sink, Protocol):
    """A sink that people watch."""

    def note(self, step: int, text: str) -> None: ...


@contextmanager
def showing(facts: RunFacts, console: Console | None = None, before: Iterable[Event] = ()) -> Iterator[View]:
    """The view that fits where the output goes: live on a terminal, lines anywhere else.

    `before`: what a run that goes on has told until now.
    """
    console = console or Console()
    seen = Seen(tally=Tally(steps=facts.steps))
    for event in before:
        seen.add(event)
    seen.begin_again()
    live = console.is_terminal
    view: View = LiveView(facts, console, seen) if live else PlainView(facts, _printer(console), seen.tally)
    try:
        yield view
    finally:
        view.close()


def _printer(console: Console) -> Callable[[str], None]:
    return lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True)


@final
class LiveView:
    """The picture of `bloomery watch`, redrawn while the run goes on; `close` leaves the last one on the screen."""

    def __init__(self, facts: RunFacts, console: Console, seen: Seen) -> None:
        self._facts, self._console, self._seen = facts, console, seen
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
            self._seen.add(event)

    def note(self, step: int, text: str) -> None:
        """A line among what happened."""
        with self._lock:
            self._seen.incidents.append((Event(step=step), harmless(text)))

    def close(self) -> None:
        self._live.stop()

    def _picture(self) -> RenderableType:
        plain = (self._console.encoding or "ascii").lower() not in ("utf-8", "utf8")
        screen = Screen(self._console.width, self._console.height - 1, plain)
        with self._lock:
            return styled(frame(self._seen, self._facts, screen, state=self._seen.state, now=time.time()))


@dataclass
class _Line:
    """A step's line, held back until nothing can join it: its exam and its save come after its StepDone."""

    step: int
    tokens: int
    loss: float | None
    tokens_per_second: float | None
    seconds_left: float | None
    memory: float | None
    exam: str = ""
    notes: list[str] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)  # what happened at this step and is told below it


@final
class PlainView:
    """One aligned line every `monitor.every` steps and at each exam. The loss is the mean since the line before."""

    def __init__(self, facts: RunFacts, write: Callable[[str], None], tally: Tally | None = None) -> None:
        self._facts = facts
        self._write: Callable[[str], None] = lambda line: write(harmless(line))
        self._tally = tally or Tally(steps=facts.steps, announced=facts.steps)
        self._line: _Line | None = None
        self._since: list[StepDone] = []
        self._curve: list[float] = []
        self._headed = False
        self._phase: tuple[str, float] = ("", 0.0)

    def write(self, event: Event) -> None:
        event = as_shown(event)  # before lines are cut: what is not seen takes no room
        announced = self._tally.announced
        self._tally.add(event)
        match event:
            case Phase(name="length") if self._tally.announced == announced:
                pass
            case StepDone():
                self._step(event)
            case EvalDone():
                self._at(event.step).exam = _exam(event, self._tally.per)
            case Saved() if event.step == self._tally.step:
                self._at(event.step).notes.append(_saved(event))
            case RunEnded():
                self._end(event)
            case Vitals() | GpuSampled():
                pass  # for a diagnosis, which says in words what is wrong, and for the live view
            case Saved() | Sampled() | Recovered() | Warned() if self._joins_the_line(event):
                assert self._line is not None
                self._line.after.append(event)
            case _:
                self._flush()
                self._say(event)

    def _joins_the_line(self, event: Event) -> bool:
        """What happened at the step of the line that is held back; a save that took some steps joins any line."""
        return self._line is not None and (self._line.step == event.step or isinstance(event, Saved))

    def note(self, step: int, text: str) -> None:
        """A line among the steps, in their columns."""
        self._flush()
        lines = textwrap.wrap(text, WIDTH - _INDENT) or [""]
        for at, line in zip([str(step)] + [""] * len(lines), lines, strict=False):
            self._write(f"{at:>6}     {line}")

    def close(self) -> None:
        self._flush()

    def _say(self, event: Event) -> None:
        match event:
            case RunStarted():
                some = f", {event.trained:,} of them trained," if event.trained is not None else ""
                where = f"on {event.device}, attention: {event.attention}"
                where += f", {event.epochs}" if event.epochs else ""
                self._titled("runs", f"{event.parameters:,} parameters{some} {where}")
            case Phase():
                self._say_phase(event)
            case Sampled():
                self._verbatim("sample", event.whole)
            case Warned():
                self._titled("warning", event.because)
            case Recovered():
                self.note(event.step, f"{event.because}; {event.action}")
            case Saved():
                self.note(event.step, _saved(event))
            case Resumed():
                self._since.clear()
                took = f"resumed in {format_seconds(event.seconds)}"
                self.note(event.step, took if event.path else "no checkpoint was saved yet: starts over")

    def _say_phase(self, event: Phase) -> None:
        name, said = self._phase
        ended = 0 < event.total <= event.done
        if event.name == name and not ended and event.time - said < _PHASE_SECONDS:
            return
        self._phase = ("" if ended else event.name, event.time)
        share = f"{min(event.done / event.total, 1):>4.0%}" if event.total else _PHASE_WORDS.get(event.name, "")
        if event.name == "length":
            share = f"{event.total:,.0f} steps fit into the time that was asked for"
        self._titled(event.name, share)

    def _titled(self, title: str, text: str) -> None:
        for index, line in enumerate(textwrap.wrap(text, WIDTH - _INDENT) or [""]):
            self._write(f"{title if index == 0 else '':<{_INDENT}}{line}".rstrip())

    def _verbatim(self, title: str, text: str) -> None:
        """The first lines as they are, long ones cut."""
        room = WIDTH - _INDENT
        for index, line in enumerate(text.expandtabs(4).splitlines()[:_SAMPLE_LINES]):
            cut = line if len(line) <= room else line[: room - 1] + "…"
            self._write(f"{title if index == 0 else '':<{_INDENT}}{cut}".rstrip())

    def _step(self, event: StepDone) -> None:
        if self._line is not None and self._line.step != event.step:
            self._flush()
        self._since.append(event)
        if event.step % self._facts.every_steps == 0 or event.loss is None or event.step == self._tally.steps:
            self._at(event.step)

    def _at(self, step: int) -> _Line:
        if self._line is None or self._line.step != step:
            self._flush()
            self._line = self._draw(step)
        return self._line

    def _draw(self, step: int) -> _Line:
        steps, self._since = self._since, []
        losses = [event.loss for event in steps if event.loss is not None]
        seconds = sum(event.step_seconds for event in steps)
        speed = self._tally.tokens_per_second if not seconds else _tokens(steps) / seconds
        if losses:
            self._curve.append(fmean(losses))
        skipped = bool(steps) and steps[-1].loss is None
        loss = None if skipped or not self._curve else self._curve[-1]
        memory = self._tally.peak_gib if self._facts.tells_memory and steps else None
        return _Line(step, self._tally.tokens, loss, speed, self._tally.seconds_left, memory)

    def _flush(self) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        if not self._headed:
            self._write("")
            self._write(header(self._tally.per, memory=self._facts.tells_memory))
            self._headed = True
        loss = "skipped" if line.loss is None else f"{line.loss:.2f}"
        speed = "" if line.tokens_per_second is None else f"{line.tokens_per_second:,.0f}"
        left = "" if line.seconds_left is None else _whole_seconds(line.seconds_left)
        wide = _NARROW_EXAM if self._facts.tells_memory else _EXAM
        row = f"{line.step:>6}{in_millions(line.tokens):>11}{loss:>9}{line.exam:>{wide}}{speed:>11}{left:>9}"
        if self._facts.tells_memory:
            row += f"{'' if line.memory is None else f'{line.memory:.2f}':>7}"
        notes = ", ".join(line.notes)
        room = max(min(_BARS, WIDTH - len(row) - len(notes) - 5), 0)
        bars = sparkline(self._curve, room)
        self._write(f"{row}   {bars:<{room}}  {notes}".rstrip())
        for event in line.after:
            self._say(event)

    def _end(self, event: RunEnded) -> None:
        took = format_seconds(self._tally.seconds)
        if event.why == "done" and self._line is not None:
            notes = [note.removeprefix("saved, ") for note in self._line.notes if note != "saved"]  # done is saved
            self._line.notes = [*notes, f"done in {took}"]
            self._flush()
            return
        self._flush()
        kind, colon, reason = event.why.partition(":")
        self._titled(kind, f"after {took}{colon}{reason}")


def _whole_seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 10 else format_seconds(seconds)


def _saved(event: Saved) -> str:
    return "saved, the best" if event.best else "saved"


def _exam(event: EvalDone, per: str) -> str:
    if event.loss is None:
        return "not finite"
    if per != "token":
        right = event.metrics.get("accuracy")
        return f"{event.loss:.2f}" + ("" if right is None else f", {right:.0%}")
    return f"{event.bits_per_byte:.2f}" if event.bits_per_byte is not None else f"{event.loss:.2f} nats"


def _tokens(steps: list[StepDone]) -> float:
    return sum(step.tokens_per_second * step.step_seconds for step in steps)
