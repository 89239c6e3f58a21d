"""Views of a running job: plain lines for a pipe or file, a live view on a terminal and in a notebook."""

import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html import escape
from importlib import import_module
from statistics import fmean
from typing import Protocol, final

from rich.console import Console, RenderableType
from rich.live import Live

from bloomery.core.text import harmless
from bloomery.core.units import format_seconds
from bloomery.monitor.events import (
    DeviceStats,
    EvalDone,
    Event,
    ExpertLoad,
    Phase,
    Recovered,
    Resumed,
    RunEnded,
    RunStarted,
    Sampled,
    Saved,
    StepChecked,
    StepDone,
    StepHealth,
    Warned,
    as_shown,
)
from bloomery.monitor.sinks import Sink
from bloomery.monitor.words import (
    BEST_CHECKPOINT,
    STARTING_PHASES,
    checked_text,
    devices_text,
    eval_text,
    incident_text,
    load_text,
)
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.plot import sparkline
from bloomery.view.run_view import RunView
from bloomery.view.screen import Screen, frame, picture, view_for_screen
from bloomery.view.summary import RunSummary, in_millions

WIDTH = 100
TITLE = 11  # columns
_BARS = 11
_SAMPLE_LINES = 6
_REDRAWS_PER_SECOND = 2
_PHASE_SECONDS = 10.0  # between two lines of one phase
_STEP_PHASES = ("rollout", "reward")  # parts of every step, told where they take long
_STEP_PHASE_SECONDS = 60.0
_PHASE_TEXTS = {
    "stopping": "a checkpoint is saved after this step, then the run stops",
    "paused": "training waits",
    "check": "one step on the GPU is compared with the CPU",
}


def titled(title: str, *texts: str) -> list[str]:
    """The title in the first columns of the first line, the texts in the others."""
    first_text, *other_texts = texts or ("",)
    first_line = f"{title:<{TITLE}}{first_text}".rstrip()
    return [first_line, *(f"{'':<{TITLE}}{text}".rstrip() for text in other_texts)]


def _columns(loss_unit: str, memory: bool) -> dict[str, int]:
    """Titles and widths."""
    names = {"token": "val bpb", "label": "val loss", "completion": "val reward"}
    name = names.get(loss_unit, "val loss, acc")
    # The loss of completions stays near 0 while their reward rises.
    rewards = {"reward": 9} if loss_unit == "completion" else {}
    widths = {
        "step": 6,
        "tokens": 11,
        **rewards,
        "loss": 9,
        name: 16 if "acc" in name else 10 if len(name) < 10 else 12,
        "tokens/s": 11,
        "ETA": 9,
    }
    return widths | ({"GiB": 7} if memory else {})


def header(loss_unit: str = "token", *, memory: bool = False) -> str:
    """The titles of the table's columns."""
    return "".join(f"{title:>{width}}" for title, width in _columns(loss_unit, memory).items())


class TerminalSink(Sink, Protocol):
    """A sink on the terminal."""

    def note(self, step: int, text: str) -> None: ...


@contextmanager
def showing(
    planned: PlannedFigures, console: Console | None = None, before: Iterable[Event] = ()
) -> Iterator[TerminalSink]:
    """A live view on a terminal or in a notebook, lines anywhere else. `before`: the events of a resumed run."""
    console = console or Console()
    run = view_for_screen(planned.steps)
    run.add_all(before)
    run.restart()

    def write(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    view: TerminalSink
    if console.is_jupyter:
        view = NotebookView(planned, run)
    elif console.is_terminal:
        view = LiveView(planned, console, run)
    else:
        view = PlainView(planned, write, run.summary)
    try:
        yield view
    finally:
        view.close()


@final
class LiveView:
    """The picture of `bloomery watch`, redrawn twice per second; `close` leaves the last one on the screen."""

    def __init__(self, planned: PlannedFigures, console: Console, run: RunView) -> None:
        self._planned = planned
        self._console = console
        self._run = run
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
            self._run.add(event)

    def note(self, step: int, text: str) -> None:
        """A line among the incidents."""
        with self._lock:
            self._run.note(step, text)

    def close(self) -> None:
        self._live.stop()

    def _picture(self) -> RenderableType:
        plain = (self._console.encoding or "ascii").lower() not in ("utf-8", "utf8")
        screen = Screen(self._console.width, self._console.height - 1, plain)
        with self._lock:
            return picture(self._run, self._planned, screen, state=self._run.state, now=time.time())


@final
class NotebookView:
    """The picture of `bloomery watch` as one output of a notebook cell, redrawn in place. The last one stays."""

    def __init__(self, planned: PlannedFigures, run: RunView) -> None:
        self._planned = planned
        self._run = run
        self._drawn = time.monotonic()
        # IPython is there in every notebook.
        self._handle = import_module("IPython.display").display(self, display_id=True)

    def write(self, event: Event) -> None:
        self._run.add(event)
        if time.monotonic() - self._drawn > 1 / _REDRAWS_PER_SECOND:
            self.close()

    def note(self, step: int, text: str) -> None:
        """A line among the incidents."""
        self._run.note(step, text)

    def close(self) -> None:
        self._drawn = time.monotonic()
        self._handle.update(self)

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        screen = Screen(WIDTH)
        text = "\n".join(
            frame(self._run, self._planned, screen, state=self._run.state, now=time.time())
        )
        return {
            "text/plain": text,
            "text/html": f'<pre style="line-height:1.2">{escape(text)}</pre>',
        }


@dataclass
class _Line:
    """A line of the table, printed when the next one begins: evaluation and checkpoint come after StepDone."""

    step: int
    cells: dict[str, str]  # by the titles of their columns, the evaluation apart
    evaluation: str = ""
    notes: list[str] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)  # printed below it


@final
class PlainView:
    """A line every `logging.every` steps and at each evaluation. The loss is the mean since the previous line."""

    def __init__(
        self,
        planned: PlannedFigures,
        write: Callable[[str], None],
        summary: RunSummary | None = None,
        width: int = WIDTH,
    ) -> None:
        self._planned = planned
        self._width = width
        self._write: Callable[[str], None] = lambda line: write(harmless(line))
        self._summary = summary or RunSummary(planned_steps=planned.steps, announced=planned.steps)
        self._line: _Line | None = None
        self._since: list[StepDone] = []
        self._curve: list[float] = []  # of losses, or of rewards
        self._loss: float | None = None
        self._reward: float | None = None
        self._headed = False
        self._phase: tuple[str, float] = ("", 0.0)
        self._last_step = 0  # in the table

    def write(self, event: Event) -> None:
        event = as_shown(event)  # before lines are cut to their width
        announced = self._summary.announced
        self._summary.add(event)
        line = self._line
        match event:
            case Phase(name="length") if self._summary.announced == announced:
                pass
            case (
                StepHealth()
                | ExpertLoad()
                | DeviceStats()
                | Phase(name="evaluation")
                | StepChecked(from_cache=True)
            ):
                pass  # for the diagnosis and the live view
            case Phase(name=name) if name in STARTING_PHASES:
                pass  # for the live view and the log
            case Phase() if not self._is_due(event):
                pass
            case StepDone():
                if line is not None and line.step != event.step:
                    self._flush()
                self._since.append(event)
                if (
                    event.step % self._planned.every_steps == 0
                    or event.loss is None
                    or event.step == self._summary.planned_steps
                ):
                    self._begin_line(event.step)
            case EvalDone():
                self._begin_line(event.step).evaluation = eval_text(event, 2).replace(
                    "accuracy ", ""
                )
            case Saved() if event.step == self._summary.step:
                self._begin_line(event.step).notes.append(incident_text(event) or "")
            case Saved() | Sampled() | Recovered() | Warned() if line is not None and (
                # An asynchronous checkpoint may be that of an earlier step.
                line.step == event.step or isinstance(event, Saved)
            ):
                line.after.append(event)
            case RunEnded():
                self._end(event)
            case _:
                self._flush()
                self._print(event)

    def note(self, step: int, text: str) -> None:
        """A line among the steps, in their columns."""
        self._flush()
        lines = textwrap.wrap(text, self._width - TITLE) or [""]
        for label, line in zip([str(step)] + [""] * len(lines), lines, strict=False):
            self._write(f"{label:>6}     {line}")

    def close(self) -> None:
        self._flush()

    def _print(self, event: Event) -> None:
        match event:
            case RunStarted():
                trainable = (
                    f" ({event.trainable:,} trainable)" if event.trainable is not None else ""
                )
                place = f"on {devices_text(event)}, attention: {event.attention}"
                place += f", {event.epochs}" if event.epochs else ""
                self._titled("model", f"{event.parameters:,} parameters{trainable} {place}")
                if (targets := event.reasons.get("adapter.target_modules")) is not None:
                    self._titled("adapter", targets)
                keys = ("router.loss", "router.z_loss", "router.bias_update")
                if balances := [event.reasons[key] for key in keys if key in event.reasons]:
                    self._titled("router", "; ".join(balances))
                if (base := event.reasons.get("quantize.kind")) is not None:
                    self._titled("base", base)
            case Phase():
                self._print_phase(event)
            case Sampled():  # the first lines as they are, long ones cut
                columns = self._width - TITLE
                text = event.titled.expandtabs(4).splitlines()[:_SAMPLE_LINES]
                cut = [line if len(line) <= columns else line[: columns - 1] + "…" for line in text]
                for line in titled("sample", *cut) if cut else ():
                    self._write(line)
            case StepChecked():
                self._titled("check", checked_text(event))
            case Warned():
                self._titled("warning", event.reason)
            case Recovered() | Saved() | Resumed():
                if not isinstance(event, Saved):
                    self._last_step = event.step  # later steps are taken again
                if isinstance(event, Resumed):
                    self._since.clear()
                news = incident_text(event) or ""
                # The checkpoint was written while later steps were computed.
                if isinstance(event, Saved) and event.step < self._last_step:
                    best = self._summary.best
                    if best is not None and best.step > event.step:  # the best no more
                        news = incident_text(replace(event, best=False)) or ""
                    self.note(self._last_step, f"{news} of step {event.step}")
                else:
                    self.note(event.step, news)

    def _is_due(self, event: Phase) -> bool:
        """Whether this progress is printed: not again within seconds, and at the end of the phase."""
        if event.name in _STEP_PHASES and self._summary.last_step is not None:
            # A rollout that is over soon has no line: the seconds count from the step before.
            printed_at = max(self._phase[1], self._summary.last_step.time)
            return event.time - printed_at >= _STEP_PHASE_SECONDS
        name, printed_at = self._phase
        is_complete = 0 < event.total <= event.done
        return event.name != name or is_complete or event.time - printed_at >= _PHASE_SECONDS

    def _print_phase(self, event: Phase) -> None:
        is_complete = 0 < event.total <= event.done
        self._phase = ("" if is_complete else event.name, event.time)
        if event.name == "length":
            text = f"{event.total:,.0f} steps fit in train.max_time"
        elif event.name in _STEP_PHASES:
            done = f"{event.done:,.0f} of {event.total:,.0f} completions"
            text = f"of step {self._summary.step + 1:,}: {done}"
        elif event.total:
            text = f"{min(event.done / event.total, 1):>4.0%}"
        else:
            text = _PHASE_TEXTS.get(event.name, "")
        self._titled(event.name, text)

    def _titled(self, title: str, text: str) -> None:
        for line in titled(title, *textwrap.wrap(text, self._width - TITLE)):
            self._write(line)

    def _begin_line(self, step: int) -> _Line:
        """The line of that step, with the mean of the steps since the previous line."""
        if self._line is not None and self._line.step == step:
            return self._line
        self._flush()
        steps = self._since
        self._since = []
        losses = [event.loss for event in steps if event.loss is not None]
        seconds = sum(event.step_seconds for event in steps)
        tokens = sum(event.tokens_per_second * event.step_seconds for event in steps)
        speed = tokens / seconds if seconds else self._summary.tokens_per_second
        seconds_left = self._summary.eta_seconds
        # The mean since the previous line, or the last one of a line without steps.
        self._loss = fmean(losses) if losses else self._loss
        rewards = [event.metrics["reward"] for event in steps if "reward" in event.metrics]
        self._reward = fmean(rewards) if rewards else self._reward
        if self._summary.scores_completions:
            self._curve += [self._reward] if rewards and self._reward is not None else []
        elif losses and self._loss is not None:
            self._curve.append(self._loss)
        skipped = self._loss is None or (bool(steps) and steps[-1].loss is None)
        cells = {
            "step": str(step),
            "tokens": in_millions(self._summary.tokens),
            "reward": "" if self._reward is None else f"{self._reward:.3f}",
            # The model as it begins is evaluated before there is a loss.
            "loss": "" if step == 0 else "skipped" if skipped else f"{self._loss:.2f}",
            "tokens/s": "" if speed is None else f"{speed:,.0f}",
            "ETA": ""
            if seconds_left is None
            else f"{seconds_left:.0f} s"
            if seconds_left < 10
            else format_seconds(seconds_left),
            "GiB": f"{self._summary.peak_gib:.2f}" if steps else "",
        }
        self._line = _Line(step, cells)
        if steps and (load := load_text(steps[-1].metrics)):
            self._line.notes.append(f"experts {load}")
        return self._line

    def _flush(self) -> None:
        line = self._line
        self._line = None
        if line is None:
            return
        unit = self._summary.loss_unit
        memory = self._planned.show_memory
        if not self._headed:
            self._write("")
            self._write(header(unit, memory=memory))
            self._headed = True
        columns = _columns(unit, memory).items()
        row = "".join(
            f"{line.cells.get(title, line.evaluation):>{width}}" for title, width in columns
        )
        # Notes stand at the end of the row; where they do not fit, on a line below it.
        notes = ", ".join(line.notes)
        is_below = len(row) + 5 + len(notes) > self._width
        notes_columns = 0 if is_below else len(notes)
        bar_columns = max(min(_BARS, self._width - len(row) - notes_columns - 5), 0)
        bar = sparkline(self._curve, bar_columns)
        self._write(f"{row}   {bar:<{bar_columns}}  {'' if is_below else notes}".rstrip())
        if is_below:
            for text in textwrap.wrap(notes, self._width - TITLE):
                self._write(f"{line.step:>6}     {text}")
        self._last_step = line.step
        for event in line.after:
            self._print(event)

    def _end(self, event: RunEnded) -> None:
        took = format_seconds(self._summary.seconds)
        if event.status == "done" and self._line is not None:
            notes = [f"done in {took}"]
            best = self._summary.best
            if best is not None and best.step < self._line.step:
                notes.insert(0, f"best: step {best.step:,}")
            elif BEST_CHECKPOINT in self._line.notes:  # the last step has a checkpoint
                notes.insert(0, "best")
            self._line.notes = notes
            self._flush()
            return
        self._flush()
        self._titled(
            event.status, f"after {took}: {event.error}" if event.error else f"after {took}"
        )
