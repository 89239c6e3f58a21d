"""`bloomery demo`: train a small model on this machine's Python source, kill and resume the run, evaluate the model.

`Story` is the terminal output of both demos: titled lines and the table of the run.
"""

import gzip
import lzma
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click
from rich.console import Console
from rich.text import Text

from bloomery.cli.common import shown_path
from bloomery.core.child import kill_group, python_module
from bloomery.core.errors import UserError
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.data.prepare.split import repeated_lines
from bloomery.data.shards import open_split, read_manifest
from bloomery.data.sources.builtin import stdlib_files
from bloomery.data.sources.documents import read_file
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.facts.counting import parameter_count
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.monitor.events import (
    EvalDone,
    Event,
    Phase,
    RunEnded,
    RunStarted,
    Saved,
    StepDone,
    follow_events,
    read_events,
)
from bloomery.monitor.words import progress_text
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.view.planned_figures import PlannedFigures
from bloomery.view.summary import RunSummary, summary_of
from bloomery.view.terminal import TITLE, WIDTH, PlainView, titled

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder

KILL_AT = 0.6  # of the run's steps: after the first checkpoint from there on
NUM_REPEATED = 10  # steps between that checkpoint and the kill, to compare their losses
FIRST_TIMED_STEP = 3  # earlier ones warm caches up
LAST_TIMED_STEP = 12
FORWARD_SHARE = 1 / 3  # of a step's time: backward takes the rest
CONTEXT_READS = 2  # the final evaluation reads every token twice: half of each window is context
# The end of the demo (loading, evaluation, sample, export, page) takes as long as this many starts of a run.
END_IN_STARTS = 1.0
BAR_WIDTH = 22
EIGHTHS = " ▏▎▍▌▋▊▉"  # of a character that a bar ends with
SAMPLE_LINES = 8


@final
class Story:
    """Lines of at most 100 columns with a title in the first eleven. With `to_stderr` stdout is free for JSON.

    On a terminal a status line below them shows the running phase or step.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.width = min(WIDTH, self._console.width) if self._console.is_terminal else WIDTH
        self._status = self._console.status("starting", spinner="line")
        self._steps: int | None = None
        self._table = PlainView(PlannedFigures(every_steps=2**62), self._print, width=self.width)

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def write(self, title: str = "", *paragraphs: str) -> None:
        """The title in the first columns of the first line, the paragraphs in the others, wrapped."""
        lines = []
        for paragraph in paragraphs:
            wrapped = textwrap.wrap(paragraph, self.width - TITLE, break_on_hyphens=False)
            lines.extend(wrapped or [""])
        for line in titled(title, *lines):
            self._print(line)

    def show(self, event: Event) -> None:
        """A line of the table per evaluation, with the checkpoint of that step; on a terminal the progress, too."""
        if isinstance(event, StepDone | EvalDone | Saved | RunEnded):
            self._table.write(event)
        if isinstance(event, RunStarted | Phase | StepDone):
            self.show_status(progress_text(event, self._steps))

    def show_status(self, text: str) -> None:
        """A moving line below the others on a terminal, until the next text; "" keeps the text."""
        if self._console.is_terminal and text:
            self._status.update(Text(text))
            self._status.start()

    def note(self, step: int, text: str) -> None:
        """A line in the table."""
        self._table.note(step, text)

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner on a terminal, nothing elsewhere."""
        self.show_status(text)
        try:
            yield
        finally:
            self._status.stop()

    def begin_table(self, steps: int, started: RunStarted | None = None) -> None:
        """Starts the table, once the length of the run is known; earlier lines have no ETA. `started` says how the run
        is judged, by default by its loss.
        """
        planned = PlannedFigures(every_steps=2**62, steps=steps)
        summary = RunSummary(planned_steps=steps, announced=steps)
        if started is not None:
            summary.add(started)
        self._table = PlainView(planned, self._print, summary, width=self.width)
        self._steps = steps

    def end_table(self) -> None:
        self._status.stop()
        self._table.close()
        click.echo(err=self._console.stderr)


@dataclass
class Kill:
    """The kill, and the results of the repeated steps before and after it: their losses, or more than these."""

    step: int
    saved_step: int  # of the checkpoint that the run resumes from
    results_before: dict[int, Any]
    results_after: dict[int, Any] = field(default_factory=dict)
    killed_at: float = field(default_factory=time.time)

    @property
    def differing_steps(self) -> list[int]:
        return [
            step
            for step, result in self.results_before.items()
            if self.results_after.get(step) != result
        ]


@dataclass
class StartUp:
    """The times at which a training process reached the first of its events, in seconds since the epoch."""

    launched: float
    first_event: float | None = None
    prepared: float | None = None  # the last event of the dataset
    first_step: float | None = None
    build_seconds: float = 0.0  # to compile C++, which happens once per machine

    def note(self, event: Event) -> None:
        if self.first_event is None:
            self.first_event = event.time
        match event:
            case Phase(name="tokenizer" | "tokens" | "checksums"):
                self.prepared = event.time
            case RunStarted():
                self.build_seconds = event.build_seconds
            case StepDone(step=1):
                self.first_step = event.time

    @property
    def seconds(self) -> float:
        """From the launch to the first step, without what a resume does not repeat: the dataset and the build."""
        assert self.first_event is not None and self.first_step is not None
        before_dataset = self.first_event - self.launched
        after_dataset = self.first_step - (self.prepared or self.first_event)
        return max(0.0, before_dataset + after_dataset - self.build_seconds)


@dataclass(frozen=True)
class Forecast:
    """Seconds of a step, and of the whole demo, from its first timed steps."""

    step: float
    total: float


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """Runs the demo from training to the report; returns the document of `--json`. Raises UserError."""
    start_time = time.time()
    folder = run_dir or free_folder("demo")
    story = Story(to_stderr=as_json)
    story.write("Bloomery demo: train a small language model on this machine's Python source code")
    story.show_status("checking this machine")
    story.write(f"{describe(detect())} · no download")
    story.write()
    story.show_status("starting")
    try:
        kill, forecast = _train_and_kill(folder, story, start_time)
        if kill is not None:
            resume_killed(folder, story, kill, lambda event: event.loss, "losses")
    finally:
        story.end_table()
    return _evaluate(folder, story, kill, forecast, start_time)


def free_folder(name: str) -> Path:
    """runs/NAME, with a number if it exists: no run is overwritten."""
    for number in count(1):
        folder = Path("runs") / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            return folder
    raise AssertionError("numbers never end")


def describe(machine: Machine) -> str:
    """GPUs, CPU and memory in a line."""
    host = machine.host
    bf16 = ", bf16 in hardware" if {"avx512_bf16", "amx_bf16"} & set(host.cpu_flags) else ""
    gpus = [f"GPU: {gpu.name}, {gpu.usable_bytes / GIB:.0f} GiB" for gpu in machine.accelerators]
    cpu = f"CPU: {host.cpu_name}, {host.cpu_cores} cores{bf16}"
    return " · ".join([*gpus, cpu, f"{host.memory_bytes / GIB:.0f} GiB memory"])


def run_name(folder: Path) -> str:
    """The argument by which a command finds this run."""
    return shlex.quote(folder.name if folder.parent == Path("runs") else str(folder))


def follow_run(folder: Path, *arguments: str, poll_seconds: float = 0.05) -> Generator[Event]:
    """The events of `bloomery ARGUMENTS` in a process until it ends; `close` kills it and its ranks.

    Its process group is its own, and Ctrl+C is forwarded once. Raises UserError with its error when it fails.
    """
    # A resumed run has events already: only those of this process are yielded.
    events = folder / "events.jsonl"
    known_bytes = events.stat().st_size if events.exists() else 0
    process = subprocess.Popen(
        python_module("bloomery", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )

    # `close`, an exception of the caller and a second Ctrl+C end here, too: no process is left behind.
    try:
        try:
            yield from follow_events(
                events,
                lambda: process.poll() is not None,
                start=known_bytes,
                poll_seconds=poll_seconds,
            )
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        if process.poll() is None:
            kill_group(process.pid)
            process.communicate()

    if process.returncode != 0:
        lines = errors.decode("utf-8", errors="replace").strip().splitlines()
        reason = f": {lines[0].removeprefix('error: ')}" if lines else ""
        raise UserError(
            f"training of the demo failed{reason}",
            where=str(folder / "log.txt"),
            fix=f"resume from the last checkpoint: `bloomery resume {folder}`",
            code=process.returncode if process.returncode > 0 else 1,
        )


def _train_and_kill(
    folder: Path, story: Story, demo_start: float
) -> tuple[Kill | None, Forecast | None]:
    """Trains until some steps after a checkpoint, and kills the process there.

    No kill when training ended before that, no forecast when it ended before the timed steps.
    """
    start_up = StartUp(launched=time.time())
    losses: dict[int, float | None] = {}
    step_seconds: list[float] = []
    steps = 0
    saved_step = 0
    forecast: Forecast | None = None
    with closing(follow_run(folder, "train", "demo", "--run-dir", str(folder))) as events:
        for event in events:
            story.show(event)
            start_up.note(event)
            match event:
                case RunStarted():
                    steps = event.steps
                    dataset_seconds = (start_up.prepared or event.time) - start_up.launched
                    _show_dataset(story, read_plan(folder / "plan.json"), dataset_seconds)
                case Saved(weights_only=False):
                    saved_step = event.step
                case StepDone():
                    losses[event.step] = event.loss
                    step_seconds.append(event.step_seconds)
                case _:
                    continue

            # The plan of the whole demo is printed once this machine's own steps are timed.
            if isinstance(event, StepDone) and event.step == LAST_TIMED_STEP:
                plan = read_plan(folder / "plan.json")
                forecast = forecast_of(
                    plan,
                    elapsed=event.time - demo_start,
                    finished_steps=event.step,
                    step=statistics.median(step_seconds[FIRST_TIMED_STEP - 1 :]),
                    start=start_up.seconds,
                    validation=read_manifest(plan.data.prepared).validation.tokens,
                )
                story.begin_table(steps)
                _show_plan(story, plan, forecast)

            # Some steps after a checkpoint, so that the resumed run has losses to repeat.
            late = saved_step >= KILL_AT * steps and event.step >= saved_step + NUM_REPEATED
            if isinstance(event, StepDone) and late:
                events.close()
                story.note(event.step, "training process killed on purpose (kill -9)")
                repeated = {step: loss for step, loss in losses.items() if step > saved_step}
                return Kill(event.step, saved_step, repeated), forecast
    return None, forecast


def forecast_of(
    plan: RunPlan,
    *,
    elapsed: float,
    finished_steps: int,
    step: float,
    start: float,
    validation: int,
) -> Forecast:
    """The demo `elapsed` seconds after its beginning, with `finished_steps` of `step` seconds each.

    Still to come: the other steps, those repeated after the kill, evaluations, the resume, and the end. `start`:
    seconds that a run takes to its first step. `validation`: tokens of that set.
    """
    steps = plan.train.steps
    assert steps is not None, "the length of the demo is fixed"
    evaluations = steps // plan.eval.every_steps if plan.eval.every_steps else 1
    evaluated_tokens = evaluations * (plan.eval.sequences or 0) * plan.data.sequence_length
    evaluated_tokens += CONTEXT_READS * validation
    evaluated_steps = FORWARD_SHARE * evaluated_tokens / plan.train.tokens_per_step
    remaining_steps = steps - finished_steps + NUM_REPEATED + evaluated_steps
    return Forecast(step, elapsed + remaining_steps * step + (1 + END_IN_STARTS) * start)


def _show_dataset(story: Story, plan: RunPlan, seconds: float) -> None:
    """Dataset and tokenizer, once the shards are written. `seconds`: the time to prepare them."""
    manifest = read_manifest(plan.data.prepared)
    train = manifest.train
    validation = manifest.validation
    num_bytes = train.bytes + validation.bytes
    num_files = train.documents + validation.documents
    story.write(
        "dataset",
        f"{num_files} files of Python's standard library, {num_bytes / 1e6:.1f} MB; "
        f"{validation.documents} files ({validation.bytes / 1e6:.2f} MB) are the validation set",
    )
    bytes_per_token = num_bytes / (train.tokens + validation.tokens)
    tokenizer = (
        f"byte-level BPE, {manifest.vocab_size:,} tokens, {bytes_per_token:.1f} bytes per token"
    )
    # The time stands at the right margin.
    story.write("tokenizer", f"{tokenizer:<{story.width - TITLE - 8}}{format_seconds(seconds):>8}")


def _show_plan(story: Story, plan: RunPlan, forecast: Forecast) -> None:
    train = plan.train
    memory = plan.memory
    precision = next(choice for choice in plan.choices if choice.key == "train.precision")
    parameters = format_count(parameter_count(plan.model.config))
    story.write(
        "plan",
        f"{parameters} parameters · {train.steps:,} steps x {train.tokens_per_step:,} tokens · "
        f"{train.precision} ({precision.reason})",
        f"{memory.total / GIB:.1f} of {memory.limit / GIB:.0f} GiB · "
        f"about {format_seconds(forecast.total)} in all, {forecast.step:.2f} s per step",
    )


def resume_killed(
    folder: Path,
    story: Story,
    kill: Kill,
    result_of: Callable[[StepDone], Any],
    compared: str,
) -> None:
    """Resumes the killed run, compares the results of the steps that it repeats, and follows it to its end.

    `compared`: what `result_of` gives of a step, in a word or two.
    """
    story.show_status("resuming from the last checkpoint")
    first_step_time: float | None = None
    with closing(follow_run(folder, "resume", str(folder))) as events:
        for event in events:
            if event.step > kill.step:
                story.show(event)
            if not isinstance(event, StepDone) or event.step not in kill.results_before:
                continue
            if first_step_time is None:
                first_step_time = event.time
            kill.results_after[event.step] = result_of(event)
            if event.step == kill.step:
                seconds = first_step_time - kill.killed_at
                story.note(kill.saved_step, _resume_text(kill, seconds, compared))


def _resume_text(kill: Kill, seconds: float, compared: str) -> str:
    """The line about the resume: its time, the repeated steps, and whether their results are the same."""
    outcome = f"{compared} bitwise identical"
    if differing_steps := kill.differing_steps:
        counts = f"{compared} of {len(differing_steps)} of {len(kill.results_before)} steps differ"
        outcome = f"{counts}, the first at step {differing_steps[0]}"
    steps = f"steps {kill.saved_step + 1} to {kill.step}"
    return f"resumed in {seconds:.1f} s; repeated {steps}: {outcome}"


def _evaluate(
    folder: Path, story: Story, kill: Kill | None, forecast: Forecast | None, start_time: float
) -> dict[str, Any]:
    """Evaluation, sample, export and page of the finished run; returns the document of `--json`."""
    # torch is imported here: until now the training processes did all of the work.
    with story.busy("loading the model"):
        from bloomery.export.layouts import export
        from bloomery.infer.generate import generate
        from bloomery.infer.model_folder import model_folder
        from bloomery.infer.sampling import Sampling
        from bloomery.model.io.weights import load_decoder
        from bloomery.report import Bars, write_report

        plan = read_plan(folder / "plan.json")
        checkpoint = model_folder(folder, "last")
        decoder = load_decoder(checkpoint)
        tokenizer = load_tokenizer(checkpoint)

    # The measure of the model are compressors that everybody has, on text that it did not train on.
    bits_per_byte = _compare_with_compressors(story, decoder, tokenizer, plan.data.prepared)

    # A sample with a penalty for repetition, since a model this small repeats itself.
    prompt = plan.sample.prompts[0]
    assert isinstance(prompt, str), "the demo's recipe has texts alone"
    sampling = Sampling(
        max_new_tokens=96, temperature=0.7, top_p=0.95, repetition_penalty=1.15, seed=0
    )
    with story.busy("sampling"):
        completion = "".join(generate(decoder, tokenizer, prompt, sampling))
    story.write("sample", *(prompt + completion).splitlines()[:SAMPLE_LINES])
    story.write()

    export_folder = folder / "export" / "hf"
    with story.busy("writing the report"):
        if not export_folder.exists():
            export(checkpoint, export_folder)
        bars = Bars(
            "Bits per byte on the whole validation set",
            tuple(bits_per_byte.items()),
            unit="bits per byte",
            note="Lower is better. Evaluations during training score a part of the set.",
            highlighted="this model",
        )
        report = write_report(folder, extras=(bars,))

    # The forecast is judged by the time of the demo, its report included.
    seconds = time.time() - start_time
    if forecast is not None:
        story.write("planned", _planned_and_measured(folder, plan, forecast, seconds))
    story.write("report", f"{shown_path(report):<31}training curves, samples, events, settings")
    story.write("model", f"{shown_path(export_folder):<31}opens in transformers and vLLM")
    story.write()
    _show_next_steps(story, folder)
    return {
        "bits_per_byte": bits_per_byte["this model"],
        "gzip_bits_per_byte": bits_per_byte["gzip -9"],
        "xz_bits_per_byte": bits_per_byte["xz -9"],
        "seconds": seconds,
        "planned_seconds": forecast.total if forecast else None,
        "report": str(report),
        "folder": str(folder),
        "killed_at_step": kill.step if kill else None,
        "repeated_steps": len(kill.results_before) if kill else 0,
        "differing_losses": len(kill.differing_steps) if kill else 0,
    }


def _compare_with_compressors(
    story: Story, decoder: "Decoder", tokenizer: Tokenizer, prepared: Path
) -> dict[str, float]:
    """Bits per byte of two compressors and the model on the validation set, printed as bars."""
    from bloomery.evals.evaluate import evaluate

    with story.busy("evaluating on the validation set"):
        split = open_split(prepared, "validation")
        # Without BOS and EOS, which every document begins and ends with.
        documents = (split.document(number)[1:-1] for number in range(len(split)))
        texts = [tokenizer.decode(tokens.tolist()) for tokens in documents]
        # Lines that training has seen are easy to predict, so the result names their share.
        validation_texts = set(texts)
        all_texts = (read_file(file.path) for file in stdlib_files())
        training_texts = (text for text in all_texts if text not in validation_texts)
        repeated_share = repeated_lines(texts, training_texts)

        content = "".join(texts).encode()
        bits_per_byte = {
            "gzip -9": 8 * len(gzip.compress(content, 9)) / len(content),
            "xz -9": 8 * len(lzma.compress(content, preset=9)) / len(content),
            "this model": evaluate(decoder, tokenizer, prepared)[0].bits_per_byte or math.nan,
        }
    story.write(
        "result",
        "bits per byte on the whole validation set "
        f"(lower is better; {repeated_share:.0%} of its lines occur in training)",
    )
    write_bars(story, bits_per_byte)
    return bits_per_byte


def write_bars(story: Story, values: dict[str, float], *, longest: float | None = None) -> None:
    """A line with a bar for each value. `longest`: the value of a whole bar, by default the largest one."""
    longest = longest or max(values.values())
    for name, value in values.items():
        num_blocks, eighths = divmod(round(value / longest * BAR_WIDTH * 8), 8)
        bar = "█" * num_blocks + EIGHTHS[eighths].strip()
        story.write("", f"  {name:<10}{value:>6.2f}  {bar}".rstrip())


def _planned_and_measured(folder: Path, plan: RunPlan, forecast: Forecast, seconds: float) -> str:
    planned_gib = plan.memory.total / GIB
    peak_gib = summary_of(read_events(folder / "events.jsonl")).peak_gib
    time_error = seconds / forecast.total - 1
    memory_error = peak_gib / planned_gib - 1
    return (
        f"time {forecast.total:.0f} s, took {seconds:.0f} s ({time_error:+.0%}) · "
        f"memory {planned_gib:.2f} GiB, peak {peak_gib:.2f} GiB ({memory_error:+.0%})"
    )


def _show_next_steps(story: Story, folder: Path) -> None:
    commands = {
        f'bloomery generate {run_name(folder)} --prompt "def read_json(path):"': "",
        "bloomery demo chat": "fine-tune it, a minute",
        'bloomery train demo data.path=~/my-code data.glob="*.go"': "your own code",
        'bloomery plan go-coder-125m --gpu "RX 6700 XT"': "before you buy a GPU",
    }
    write_next_steps(story, commands)


def write_next_steps(story: Story, commands: dict[str, str]) -> None:
    """Commands, each with its purpose."""
    # After `make demo`, bloomery is in an environment that this shell has not activated.
    activate = Path(sys.prefix) / "bin" / "activate"
    if shutil.which("bloomery") is None and activate.is_file():
        commands = {f"source {shown_path(activate)}": "", **commands}
    lines = (f"{command:<66}{purpose}".rstrip() for command, purpose in commands.items())
    story.write("next", *lines)
