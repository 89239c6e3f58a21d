"""`bloomery demo`: train a small model on this machine's Python source, kill and resume the run, evaluate the model.

`Story` is the terminal output of both demos: titled lines and the table of the run.
"""

import gzip
import lzma
import math
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import click
from rich.console import Console
from rich.text import Text

from bloomery.cli.common import NewPath, print_json
from bloomery.core.child import kill_group
from bloomery.core.errors import UserError
from bloomery.core.units import GIB, format_count, format_seconds
from bloomery.data.prepare.split import repeated_lines
from bloomery.data.shards import open_split, read_manifest
from bloomery.data.sources.builtin import stdlib_files
from bloomery.data.sources.documents import read_file
from bloomery.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.model.counting import parameter_count
from bloomery.monitor.events import (
    EvalDone,
    Event,
    Phase,
    RunEnded,
    RunStarted,
    Saved,
    StepDone,
    follow,
    read_events,
)
from bloomery.monitor.lines import TITLE, WIDTH, PlainView, titled
from bloomery.monitor.summary import RunFacts, summary_of
from bloomery.monitor.words import progress_text
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan

if TYPE_CHECKING:
    from bloomery.model.decoder import Decoder


@final
class Story:
    """Lines of at most 100 columns with a title in the first eleven. With `to_stderr` stdout is free for JSON.

    On a terminal a status line below them shows the running phase or step.
    """

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)
        self.width = min(WIDTH, self._console.width) if self._console.is_terminal else WIDTH
        self._status = self._console.status("starting", spinner="line")
        self._view = PlainView(RunFacts(every_steps=2**62), self._print, width=self.width)
        self._steps: int | None = None

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False)

    def write(self, title: str = "", *lines: str) -> None:
        """The title in the first columns of the first line, the lines in the others, wrapped."""
        room = self.width - TITLE
        wrapped = [
            part
            for line in lines
            for part in textwrap.wrap(line, room, break_on_hyphens=False) or [""]
        ]
        for line in titled(title, *wrapped):
            self._print(line)

    def show(self, event: Event) -> None:
        """A line of the table per evaluation, with the checkpoint of that step; on a terminal the progress, too."""
        if isinstance(event, StepDone | EvalDone | Saved | RunEnded):
            self._view.write(event)
        if isinstance(event, RunStarted | Phase | StepDone):
            self.show_status(progress_text(event, self._steps))

    def show_status(self, text: str) -> None:
        """A moving line below the others on a terminal, until the next text; "" keeps the text."""
        if self._console.is_terminal and text:
            self._status.update(Text(text))
            self._status.start()

    def note(self, step: int, text: str) -> None:
        """A line in the table."""
        self._view.note(step, text)

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """A spinner on a terminal, nothing elsewhere."""
        self.show_status(text)
        try:
            yield
        finally:
            self._status.stop()

    def begin_table(self, steps: int) -> None:
        """Once the length of the run is known; earlier lines have no ETA."""
        self._view = PlainView(
            RunFacts(every_steps=2**62, steps=steps), self._print, width=self.width
        )
        self._steps = steps

    def end_table(self) -> None:
        self._status.stop()
        self._view.close()
        click.echo(err=self._console.stderr)


KILL_AT = 0.6  # of the run's steps: after the first checkpoint from there on
REPEATED = 10  # steps between that checkpoint and the kill, to compare their losses
TIMED_STEPS = range(3, 13)  # the plan's step time is their median; earlier ones warm caches up
FORWARD_SHARE = 1 / 3  # of a step's time: backward takes the rest
CONTEXT_READS = 2  # the final evaluation reads every token twice: half of each window is context
END_STARTS = (
    # loading, sample, exports and report, in times from a process's start to its first step: 7 s against 4.7
    1.5
)
BUSY_CORES = 0.25  # used by other programs, from which on the demo mentions them
SLOWER = 1.15  # steps against the timed ones, from which on the demo mentions them
BAR = 22  # characters of the longest bar
SAMPLE_LINES = 8


@dataclass
class Kill:
    """The kill, and the losses of the repeated steps before and after it."""

    step: int
    saved: int  # the checkpoint that the run resumes from
    before: dict[int, float | None]
    after: dict[int, float | None] = field(default_factory=dict)
    at: float = field(default_factory=time.time)
    gap_seconds: float = 0.0  # from the kill to the end of the first step after it

    @property
    def differing(self) -> list[int]:
        return [step for step, loss in self.before.items() if self.after.get(step) != loss]


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """The whole demo; returns the document of `--json`. Raises UserError."""
    began = time.time()
    folder = run_dir or free_folders("demo")[0]
    story = Story(to_stderr=as_json)
    story.write("Bloomery demo: train a small language model on this machine's Python source code")
    story.show_status("checking this machine")
    busy = cores_used_by_others(0.5)
    story.write(f"{describe(detect())} · no download")
    if busy >= BUSY_CORES:
        story.write(
            f"Other programs use {busy:.1f} cores now: the demo takes longer than on a quiet machine."
        )
    story.write()
    story.show_status("starting")
    try:
        kill, forecast = _train_and_kill(folder, story, began)
        if kill is not None:
            _resume(folder, story, kill)
    finally:
        story.end_table()
    return evaluate_demo(folder, story, kill, began, forecast)


def cores_used_by_others(seconds: float) -> float:
    """CPU time that other programs take from this process's cores within `seconds`; 0 where the system hides it."""

    def busy() -> float:
        """Seconds of these cores in user and system mode, niced or not, or stolen by the host."""
        with suppress(OSError, ValueError, IndexError):
            lines = Path("/proc/stat").read_text().splitlines()
            ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
            fields = [line.split() for line in lines if line.split()[0] in ours]
            return sum(sum(int(field[at]) for at in (1, 2, 3, 8)) for field in fields) / os.sysconf(
                "SC_CLK_TCK"
            )
        return 0.0

    before = busy()
    own = time.process_time()
    time.sleep(seconds)
    return max(0.0, busy() - before - (time.process_time() - own)) / seconds


def free_folders(*names: str) -> list[Path]:
    """runs/NAME of each, all of them with the same number if one exists: no run is overwritten."""
    for number in count(1):
        folders = [Path("runs") / (name if number == 1 else f"{name}-{number}") for name in names]
        if not any(folder.exists() for folder in folders):
            return folders
    raise AssertionError("numbers never end")


def describe(machine: Machine) -> str:
    """GPUs, CPU and memory in a line."""
    host = machine.host
    bf16 = ", bf16 in hardware" if {"avx512_bf16", "amx_bf16"} & set(host.cpu_flags) else ""
    gpus = [f"GPU: {gpu.name}, {gpu.usable_bytes / GIB:.0f} GiB" for gpu in machine.accelerators]
    cpu = f"CPU: {host.cpu_name}, {host.cpu_cores} cores{bf16}"
    return " · ".join([*gpus, cpu, f"{host.memory_bytes / GIB:.0f} GiB memory"])


def followed(folder: Path, *arguments: str) -> Generator[Event]:
    """The events of `bloomery ARGUMENTS` in a process until it ends; `close` kills it and its ranks.

    Its process group is its own, and Ctrl+C is forwarded once. Raises UserError with its error when it fails.
    """
    events = folder / "events.jsonl"
    known = events.stat().st_size if events.exists() else 0
    process = subprocess.Popen(
        [sys.executable, "-m", "bloomery", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        try:
            yield from follow(
                events, lambda: process.poll() is not None, start=known, poll_seconds=0.05
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
        raise UserError(
            "training of the demo failed"
            + (f": {lines[0].removeprefix('error: ')}" if lines else ""),
            where=str(folder / "log.txt"),
            fix=f"resume from the last checkpoint: `bloomery resume {folder}`",
            code=process.returncode if process.returncode > 0 else 1,
        )


@dataclass(frozen=True)
class Forecast:
    """Seconds of the whole demo, from its first timed steps. `start`: from a process's launch to its first step."""

    step: float
    start: float
    total: float


def forecast_of(
    plan: RunPlan, *, elapsed: float, done: int, step: float, start: float, validation: int
) -> Forecast:
    """The demo `elapsed` seconds after its beginning, with `done` steps taken; `validation`: tokens of that set.

    Still to come: the other steps, those repeated after the kill, evaluations, the resume, and the end.
    """
    steps = plan.train.steps
    assert steps is not None, "the length of the demo is fixed"
    evaluations = steps // plan.eval.every_steps if plan.eval.every_steps else 1
    sequences = evaluations * (plan.eval.sequences or 0)
    read = sequences * plan.data.sequence_length + CONTEXT_READS * validation
    forward = FORWARD_SHARE * read / plan.train.tokens_per_step
    left = (steps - done + REPEATED + forward) * step + (1 + END_STARTS) * start
    return Forecast(step=step, start=start, total=elapsed + left)


def _train_and_kill(
    folder: Path, story: Story, demo_began: float
) -> tuple[Kill | None, Forecast | None]:
    """No kill when training ended before one after a checkpoint, no forecast when it ended before the timed steps."""
    losses: dict[int, float | None] = {}
    seconds: list[float] = []
    forecast: Forecast | None = None
    saved = 0
    steps = 0
    launched = time.time()
    first_event = 0.0
    prepared = 0.0
    with closing(followed(folder, "train", "demo", "--run-dir", str(folder))) as events:
        for event in events:
            story.show(event)
            first_event = first_event or event.time
            match event:
                case Phase(name="tokenizer" | "tokens" | "checksums"):
                    prepared = event.time
                case RunStarted():
                    steps = event.steps
                    _show_dataset(
                        story, read_plan(folder / "plan.json"), (prepared or event.time) - launched
                    )
                case Saved(weights_only=False):
                    saved = event.step
                case StepDone():
                    losses[event.step] = event.loss
                    seconds.append(event.step_seconds)
                    # the time before the dataset's first event, and from its last one
                    if event.step == 1:
                        start = first_event - launched + event.time - (prepared or first_event)
                    if event.step == TIMED_STEPS[-1]:
                        plan = read_plan(folder / "plan.json")
                        forecast = forecast_of(
                            plan,
                            elapsed=event.time - demo_began,
                            done=event.step,
                            start=start,
                            step=statistics.median(seconds[TIMED_STEPS[0] - 1 :]),
                            validation=read_manifest(plan.data.prepared).validation.tokens,
                        )
                        story.begin_table(steps)
                        _show_plan(story, plan, forecast)
                    if saved >= KILL_AT * steps and event.step >= saved + REPEATED:
                        events.close()
                        story.note(event.step, "training process killed on purpose (kill -9)")
                        return Kill(
                            event.step, saved, {s: x for s, x in losses.items() if s > saved}
                        ), forecast
    return None, forecast


def _show_dataset(story: Story, plan: RunPlan, seconds: float) -> None:
    """Dataset and tokenizer, once the shards are written. `seconds`: the time to prepare them."""
    manifest = read_manifest(plan.data.prepared)
    train = manifest.train
    validation = manifest.validation
    size = train.bytes + validation.bytes
    files = train.documents + validation.documents
    story.write(
        "dataset",
        f"{files} files of Python's standard library, {size / 1e6:.1f} MB; "
        f"{validation.documents} files ({validation.bytes / 1e6:.2f} MB) are the validation set",
    )
    each = size / (train.tokens + validation.tokens)
    bpe = f"byte-level BPE, {manifest.vocab_size:,} tokens, {each:.1f} bytes per token"
    # at the right margin
    story.write("tokenizer", f"{bpe:<{story.width - TITLE - 8}}{format_seconds(seconds):>8}")


def _show_plan(story: Story, plan: RunPlan, forecast: Forecast) -> None:
    """The plan, once the first steps are timed."""
    train = plan.train
    memory = plan.memory
    reason = next(choice.reason for choice in plan.choices if choice.key == "train.precision")
    size = format_count(parameter_count(plan.model.config))
    tokens = f"{train.steps:,} steps x {train.tokens_per_step:,} tokens"
    fits = f"{memory.total / GIB:.1f} of {memory.limit / GIB:.0f} GiB"
    whole = f"about {format_seconds(forecast.total)} in all, {forecast.step:.2f} s per step"
    story.write(
        "plan", f"{size} parameters · {tokens} · {train.precision} ({reason})", f"{fits} · {whole}"
    )


def time_text(forecast: Forecast, took: float, kill: Kill | None, step_seconds: float) -> str:
    """Planned and measured time of the whole demo; slower steps than those timed are named."""
    text = f"time {forecast.total:.0f} s, took {took:.0f} s ({took / forecast.total - 1:+.0%})"
    if kill is not None:
        text += f", resume {kill.gap_seconds:.1f} s"
    if step_seconds > SLOWER * forecast.step:
        text += f"; steps took {step_seconds:.2f} s, not {forecast.step:.2f}: other programs used the CPU"
    return text


def _resume(folder: Path, story: Story, kill: Kill) -> None:
    story.show_status("resuming from the last checkpoint")
    with closing(followed(folder, "resume", str(folder))) as events:
        for event in events:
            if isinstance(event, StepDone) and not kill.after:
                kill.gap_seconds = event.time - kill.at
            if isinstance(event, StepDone) and event.step in kill.before:
                kill.after[event.step] = event.loss
                if event.step == kill.step:
                    first = f"steps {kill.saved + 1} to {kill.step}"
                    differing = kill.differing
                    same = "losses bitwise identical"
                    if differing:
                        same = f"{len(differing)} of {len(kill.before)} losses differ, the first at step {differing[0]}"
                    story.note(
                        kill.saved, f"resumed in {kill.gap_seconds:.1f} s; repeated {first}: {same}"
                    )
            if event.step > kill.step:
                story.show(event)


def evaluate_demo(
    folder: Path, story: Story, kill: Kill | None, began: float, forecast: Forecast | None = None
) -> dict[str, Any]:
    """Evaluation, sample, export and report of the finished run; returns the document of `--json`."""
    with story.busy("loading the model"):
        from bloomery.export.layouts import export
        from bloomery.model.decoding import Sampling
        from bloomery.model.io.weights import load_decoder
        from bloomery.report import Bars, write_report
        from bloomery.runs.generate import generate
        from bloomery.train.model_folder import model_folder

        plan = read_plan(folder / "plan.json")
        checkpoint = model_folder(folder, "last")
        decoder = load_decoder(checkpoint)
        tokenizer = load_tokenizer(checkpoint)
    bits = _bits_per_byte(story, decoder, tokenizer, plan.data.prepared)
    prompt = plan.sample.prompts[0]
    sampling = Sampling(
        max_new_tokens=96, temperature=0.7, top_p=0.95, repetition_penalty=1.15, seed=0
    )
    with story.busy("sampling"):
        completion = "".join(generate(decoder, tokenizer, prompt, sampling))
    story.write("sample", *(prompt + completion).splitlines()[:SAMPLE_LINES])
    story.write()
    model = folder / "export" / "hf"
    with story.busy("writing the report"):
        if not model.exists():
            export(checkpoint, model)
        title = "Bits per byte on the whole validation set"
        note = "Lower is better. Evaluations during training score a part of the set."
        bars = Bars(title, tuple(bits.items()), unit="bits per byte", note=note, own="this model")
        gguf, gguf_line = export_demo_gguf(model, folder / "export" / f"{folder.name}.gguf")
        report = write_report(folder, extras=(bars,))
    summary = summary_of(read_events(folder / "events.jsonl"))
    memory = plan.memory.total / GIB
    peak = f"memory {memory:.2f} GiB, peak {summary.peak_gib:.2f} GiB ({summary.peak_gib / memory - 1:+.0%})"
    took = time.time() - began
    times = (
        ""
        if forecast is None
        else time_text(forecast, took, kill, summary.trained_seconds / summary.steps_run)
    )
    story.write("planned", *filter(None, (times, peak)))
    story.write(
        "report", f"{folder / 'report.html'!s:<31}training curves, samples, events, settings"
    )
    story.write("model", f"{model!s:<31}opens in transformers and vLLM")
    story.write("gguf", gguf_line)
    story.write()
    _next_steps(story, folder)
    return {
        "bits_per_byte": bits["this model"],
        "gzip_bits_per_byte": bits["gzip -9"],
        "xz_bits_per_byte": bits["xz -9"],
        "seconds": took,
        "planned_seconds": forecast.total if forecast else None,
        "step_seconds": summary.trained_seconds / summary.steps_run,
        "resume_seconds": kill.gap_seconds if kill else None,
        "report": str(report),
        "folder": str(folder),
        "gguf": None if gguf is None else str(gguf),
        "killed_at_step": kill.step if kill else None,
        "repeated_steps": len(kill.before) if kill else 0,
        "differing_losses": len(kill.differing) if kill else 0,
    }


def export_demo_gguf(model: Path, out: Path) -> tuple[Path | None, str]:
    """Writes a demo's model as a GGUF file unless `out` exists: the file, or None, and a line for the terminal."""
    from bloomery.export.gguf import export_gguf
    from bloomery.train.model_folder import find_model

    if find_spec("gguf") is None:
        return None, "not written: the gguf package is not installed; pip install 'bloomery[gguf]'"
    if not out.exists():
        export_gguf(find_model(model), out)
    shown = os.path.relpath(out) if out.absolute().is_relative_to(Path.cwd()) else str(out)
    return out, f"{shown:<31}runs in llama.cpp and Ollama: llama-cli -m {shlex.quote(shown)}"


def _bits_per_byte(
    story: Story, decoder: "Decoder", tokenizer: Tokenizer, prepared: Path
) -> dict[str, float]:
    """Of two compressors and the model on the validation set, printed as bars."""
    from bloomery.runs.evaluate import evaluate

    with story.busy("evaluating on the validation set"):
        split = open_split(prepared, "validation")
        texts = [
            tokenizer.decode([int(token) for token in split.document(n)[1:-1]])
            for n in range(len(split))
        ]
        known = set(texts)
        repeated = repeated_lines(
            texts, (t for f in stdlib_files() if (t := read_file(f.path)) not in known)
        )
        whole = "".join(texts).encode()
        bits = {
            "gzip -9": 8 * len(gzip.compress(whole, 9)) / len(whole),
            "xz -9": 8 * len(lzma.compress(whole, preset=9)) / len(whole),
            "this model": evaluate(decoder, tokenizer, prepared)[0].bits_per_byte or math.nan,
        }
    story.write(
        "result",
        "bits per byte on the whole validation set "
        f"(lower is better; {repeated:.0%} of its lines occur in training)",
    )
    for name, value in bits.items():
        eighths = round(value / max(bits.values()) * BAR * 8)  # of a character
        story.write(
            "",
            f"  {name:<10}{value:>6.2f}  {'█' * (eighths // 8)}{' ▏▎▍▌▋▊▉'[eighths % 8].strip()}",
        )
    return bits


def _next_steps(story: Story, folder: Path) -> None:
    name = shlex.quote(folder.name if folder.parent == Path("runs") else str(folder))
    script = Path(sys.prefix) / "bin" / "activate"
    near = os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    found = shutil.which("bloomery") is not None or not script.is_file()  # not after `make demo`
    commands = {
        **({} if found else {f"source {near}": ""}),
        f'bloomery generate {name} --prompt "def read_json(path):"': "",
        "bloomery demo chat": "fine-tune it, 2 minutes",
        'bloomery train demo data.path=~/my-code data.glob="*.go"': "your own code",
        'bloomery plan go-coder-125m --gpu "RX 6700 XT"': "before you buy a GPU",
    }
    story.write(
        "next", *(f"{command:<66}{purpose}".rstrip() for command, purpose in commands.items())
    )


@click.command()
@click.argument("what", required=False, type=click.Choice(["chat"]))
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document; the rest goes to stderr."
)
@click.option("--run-dir", type=NewPath(), help="Folder of the run [default: runs/demo].")
def command(what: str | None, as_json: bool, run_dir: Path | None) -> int:
    """Train, kill, resume, evaluate and export a small model: 2 minutes on 2 cores.

    `bloomery demo chat` then fine-tunes that model with LoRA and in full: 2 minutes more.

    Example: bloomery demo --run-dir runs/first
    """
    from bloomery.cli import demo_chat

    document = (demo_chat.demonstrate if what == "chat" else demonstrate)(
        run_dir=run_dir, as_json=as_json
    )
    if as_json:
        print_json(document)
    return 0
