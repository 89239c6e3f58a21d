"""`bloomery demo`: train a small model on this machine's own Python source, kill it, resume it, examine it."""

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
REPEATED = 5  # steps at least between the last checkpoint and the kill, so that there is something to compare


@final
@dataclass
class Kill:
    """The kill, and the losses told before and after it for the steps that had to be repeated."""

    step: int
    saved: int  # the checkpoint that the run comes back to
    before: dict[int, float | None]
    after: dict[int, float | None] = field(default_factory=dict)
    back_seconds: float = 0.0

    @property
    def differing(self) -> list[int]:
        return [step for step, loss in self.before.items() if self.after.get(step) != loss]


@click.command()
@click.argument("what", required=False, type=click.Choice(["chat"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end; the story goes to stderr.")
@click.option("--run-dir", type=NewPath(), help="Where the run goes [default: runs/demo].")
def command(what: str | None, as_json: bool, run_dir: Path | None) -> int:
    """Train a small model on this machine, kill it, resume it, examine it: about two minutes on two cores.

    `bloomery demo chat` lets that model learn to answer, by adapters and with every weight: two minutes more.

    Example: bloomery demo --run-dir runs/first
    """
    from bloomery.cli.common import print_json

    if what == "chat":
        from bloomery.cli.demo.chat import demonstrate

        told = demonstrate(run_dir=run_dir, as_json=as_json)
        if as_json:
            print_json(told)
        return 0
    from bloomery.cli.demo.evaluation import examine, introduce
    from bloomery.cli.demo.story import Story

    began = time.time()
    folder = run_dir or _free_folder()
    story = Story(to_stderr=as_json)
    introduce(story)
    try:
        with Trainer(folder) as trainer:
            kill = _train_and_kill(trainer, story)
            if kill is not None:
                _resume(trainer, story, kill)
    finally:
        story.end_table()
    result = examine(folder, story, kill, began)
    if as_json:
        print_json(result)
    return 0


def _free_folder() -> Path:
    """runs/demo, or runs/demo-2 and so on: an earlier demo is never overwritten."""
    number, folder = 1, Path("runs/demo")
    while folder.exists():
        number += 1
        folder = Path(f"runs/demo-{number}")
    return folder


@final
class Trainer:
    """`bloomery train` or `resume` as a process of its own, watched through the events that it writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def run(self, *words: str) -> Iterator[Event]:
        """What the process tells, until it ends. It leads a group of its own: a kill takes its ranks along,
        and Ctrl+C reaches it once, through us. Raises UserError with its last words when it fails.
        """
        events = self.folder / "events.jsonl"
        known = events.stat().st_size if events.exists() else 0
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "bloomery", *words],
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
            words = errors.decode("utf-8", errors="replace").strip().splitlines()
            raise UserError(
                "the demo's training ended early" + (f": {words[0].removeprefix('error: ')}" if words else ""),
                where=str(self.folder / "log.txt"),
                fix=f"`bloomery resume {self.folder}` goes on from the last checkpoint",
                code=process.returncode if process.returncode > 0 else 1,
            )

    def kill(self) -> None:
        """SIGKILL to the process and all its children; harmless when they have ended."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()


def _train_and_kill(trainer: Trainer, story: "Story") -> Kill | None:
    """None when training ended before there was a checkpoint to come back to."""
    from bloomery.cli.demo.evaluation import tell_plan, tell_text
    from bloomery.plan.store import read_plan

    losses: dict[int, float | None] = {}
    steps, saved, began = 0, 0, time.time()
    for event in trainer.run("train", "demo", "--run-dir", str(trainer.folder)):
        story.show(event)
        match event:
            case RunStarted():
                tell_text(story, read_plan(trainer.folder / "plan.json"), event.time - began)
            case Phase(name="length") if steps:
                steps = round(event.total)
            case Phase(name="length"):
                steps = round(event.total)
                story.begin_table(steps)
                tell_plan(story, read_plan(trainer.folder / "plan.json"))
            case Saved():
                saved = event.step
            case StepDone():
                losses[event.step] = event.loss
                if saved and steps and event.step >= max(KILL_AT * steps, saved + REPEATED):
                    trainer.kill()
                    story.note(event.step, "kill -9 sent to the training process, on purpose")
                    return Kill(event.step, saved, {s: x for s, x in losses.items() if s > saved})
    return None


def _resume(trainer: Trainer, story: "Story", kill: Kill) -> None:
    for event in trainer.run("resume", str(trainer.folder)):
        if isinstance(event, Resumed):
            kill.back_seconds = event.seconds  # the report's figure, too
        if isinstance(event, StepDone) and event.step in kill.before:
            kill.after[event.step] = event.loss
            if event.step == kill.step:
                story.note(kill.saved, _verdict(kill))
        if event.step > kill.step:
            story.show(event)


def _verdict(kill: Kill) -> str:
    again = f"resumed in {kill.back_seconds:.1f} s; steps {kill.saved + 1} to {kill.step} once more: "
    if not kill.differing:
        return again + "every loss the same to the last bit"
    return again + f"{len(kill.differing)} of {len(kill.before)} losses differ, the first at step {kill.differing[0]}"
