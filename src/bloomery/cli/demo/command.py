"""`bloomery demo`: train a small model on this machine's Python source, kill and resume the run, evaluate the model."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self, final

import click

from bloomery.cli.common import NewPath
from bloomery.core.errors import UserError
from bloomery.monitor.events import Event, Phase, Resumed, RunStarted, Saved, StepDone, follow

if TYPE_CHECKING:
    from bloomery.cli.demo.story import Story

KILL_AT = 2 / 3  # of the run's steps
REPEATED = 5  # steps at least between the last checkpoint and the kill, to compare their losses


@final
@dataclass
class Kill:
    """The kill, and the losses of the repeated steps before and after it."""

    step: int
    saved: int  # the checkpoint that the run resumes from
    before: dict[int, float | None]
    after: dict[int, float | None] = field(default_factory=dict)
    back_seconds: float = 0.0

    @property
    def differing(self) -> list[int]:
        return [step for step, loss in self.before.items() if self.after.get(step) != loss]


@click.command()
@click.argument("what", required=False, type=click.Choice(["chat"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; the rest goes to stderr.")
@click.option("--run-dir", type=NewPath(), help="Folder of the run [default: runs/demo].")
def command(what: str | None, as_json: bool, run_dir: Path | None) -> int:
    """Train, kill, resume and evaluate a small model: 2 minutes on 2 cores.

    `bloomery demo chat` then fine-tunes that model with LoRA and in full: 2 minutes more.

    Example: bloomery demo --run-dir runs/first
    """
    from bloomery.cli.common import print_json

    if what == "chat":
        from bloomery.cli.demo.chat import demonstrate

        document = demonstrate(run_dir=run_dir, as_json=as_json)
        if as_json:
            print_json(document)
        return 0
    from bloomery.cli.demo.evaluation import describe, evaluate_demo
    from bloomery.cli.demo.story import Story
    from bloomery.hardware.detect.detect import detect

    began = time.time()
    folder = run_dir or _free_folder()
    story = Story(to_stderr=as_json)
    story.write("Bloomery demo: train a small language model on this machine's Python source code")
    story.write(f"{describe(detect())} · no download")
    story.write()
    try:
        with Trainer(folder) as trainer:
            kill = _train_and_kill(trainer, story)
            if kill is not None:
                _resume(trainer, story, kill)
    finally:
        story.end_table()
    result = evaluate_demo(folder, story, kill, began)
    if as_json:
        print_json(result)
    return 0


def _free_folder() -> Path:
    """runs/demo, else runs/demo-2 and so on: no run is overwritten."""
    number, folder = 1, Path("runs/demo")
    while folder.exists():
        number += 1
        folder = Path(f"runs/demo-{number}")
    return folder


@final
class Trainer:
    """`bloomery train` or `resume` in a process, followed through its events."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, *arguments: str) -> Iterator[Event]:
        """Events until the process ends. Its process group is its own: a kill includes its ranks, and Ctrl+C is
        forwarded once. Raises UserError with its error when it fails.
        """
        events = self.folder / "events.jsonl"
        known = events.stat().st_size if events.exists() else 0
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "bloomery", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            yield from follow(events, lambda: process.poll() is not None, start=known, poll_seconds=0.05)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
        self._end(process)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        _, errors = process.communicate()
        if process.returncode != 0:
            lines = errors.decode("utf-8", errors="replace").strip().splitlines()
            raise UserError(
                "training of the demo failed" + (f": {lines[0].removeprefix('error: ')}" if lines else ""),
                where=str(self.folder / "log.txt"),
                fix=f"resume from the last checkpoint: `bloomery resume {self.folder}`",
                code=process.returncode if process.returncode > 0 else 1,
            )

    def kill(self) -> None:
        """Sends SIGKILL to the process and its children, if they run."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


def _train_and_kill(trainer: Trainer, story: "Story") -> Kill | None:
    """None when training ended before a kill after the first checkpoint."""
    from bloomery.cli.demo.evaluation import show_dataset, show_plan
    from bloomery.plan.store import read_plan

    losses: dict[int, float | None] = {}
    steps, saved, began = 0, 0, time.time()
    for event in trainer.run("train", "demo", "--run-dir", str(trainer.folder)):
        story.show(event)
        match event:
            case RunStarted():
                show_dataset(story, read_plan(trainer.folder / "plan.json"), event.time - began)
            case Phase(name="length") if steps:
                steps = round(event.total)
            case Phase(name="length"):
                steps = round(event.total)
                story.begin_table(steps)
                show_plan(story, read_plan(trainer.folder / "plan.json"))
            case Saved():
                saved = event.step
            case StepDone():
                losses[event.step] = event.loss
                if saved and steps and event.step >= max(KILL_AT * steps, saved + REPEATED):
                    trainer.kill()
                    story.note(event.step, "training process killed on purpose (kill -9)")
                    return Kill(event.step, saved, {s: x for s, x in losses.items() if s > saved})
    return None


def _resume(trainer: Trainer, story: "Story", kill: Kill) -> None:
    for event in trainer.run("resume", str(trainer.folder)):
        if isinstance(event, Resumed):
            kill.back_seconds = event.seconds  # the report's figure, too
        if isinstance(event, StepDone) and event.step in kill.before:
            kill.after[event.step] = event.loss
            if event.step == kill.step:
                first, differing = f"steps {kill.saved + 1} to {kill.step}", kill.differing
                same = "losses bitwise identical"
                if differing:
                    same = f"{len(differing)} of {len(kill.before)} losses differ, the first at step {differing[0]}"
                story.note(kill.saved, f"resumed in {kill.back_seconds:.1f} s; repeated {first}: {same}")
        if event.step > kill.step:
            story.show(event)
