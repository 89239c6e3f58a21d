"""`bloomery demo chat`: the first demo's model learns to answer, by adapters and with every weight, and is compared"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from bloomery.cli.demo.command import Trainer
from bloomery.cli.demo.evaluation import describe
from bloomery.cli.demo.story import Story
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.monitor.events import Phase, RunEnded, RunStarted, read_events

if TYPE_CHECKING:
    from bloomery.plan.types import RunPlan

RECIPES = {"lora": "demo-chat-lora", "full": "demo-chat-full"}


@final
class Tuned:
    """A run of this demo, and the base that it started from."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder

    @property
    def plan(self) -> "RunPlan":
        from bloomery.plan.store import read_plan

        return read_plan(self.folder / "plan.json")


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """The whole demo; returns the document of `--json`. Raises UserError."""
    from bloomery.cli.demo.chat_evaluation import examine
    from bloomery.hardware.detect.detect import detect

    began = time.time()
    story = Story(to_stderr=as_json)
    story.say("Bloomery: the model of your first demo learns to answer questions")
    story.say(f"{describe(detect())} · nothing is downloaded")
    story.say()
    base = find_base() or train_base(story)
    _tell_base(story, base)
    folders = free_folders(run_dir)
    lora = _train(story, "lora", folders["lora"], f"model.from={base}")
    told = lora.plan
    same = (f"train.max_steps={told.train.steps}", f"data.prepared={told.data.prepared}")
    full = _train(story, "full", folders["full"], f"model.from={base}", *same)
    return examine(story, base, [lora, full], began)


def find_base() -> Path | None:
    """The newest finished run of `bloomery demo`, as a folder that transformers opens."""
    from bloomery.runs.names import all_runs

    for folder in reversed(all_runs()):
        events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").is_file() else []
        ended = [event for event in events if isinstance(event, RunEnded)]
        name = folder.name == "demo" or (folder.name.startswith("demo-") and folder.name[5:].isdecimal())
        if name and ended and ended[-1].status == "done":
            return exported(folder)
    return None


def exported(run: Path) -> Path:
    """Its export, which is made when it has none."""
    from bloomery.export.layouts import export
    from bloomery.train.model_folder import model_folder

    folder = run / "export" / "hf"
    if not folder.exists():
        export(model_folder(run, "last"), folder)
    return folder.absolute()


def train_base(story: Story) -> Path:
    """Without the kill and the exam of `bloomery demo`."""
    folder = Path("runs/demo")
    if folder.exists():
        fix = f"`bloomery resume {folder}` finishes it, or delete it"
        raise UserError("the first demo's run was never finished", where=str(folder), fix=fix)
    story.say("base", "there is no model of the first demo in runs/ yet, so it is trained now")
    _follow(story, "demo", folder)
    return exported(folder)


def _tell_base(story: Story, base: Path) -> None:
    from bloomery.model.counting import parameter_count
    from bloomery.model.families.presets import read_config

    size = format_count(parameter_count(read_config(base)))
    where = base.relative_to(Path.cwd()) if base.is_relative_to(Path.cwd()) else base
    story.say("base", f"{where}: {size} parameters that have learned to go on with Python")


def free_folders(run_dir: Path | None) -> dict[str, Path]:
    """runs/demo-chat-lora and runs/demo-chat-full, with a number where they exist: nothing is overwritten."""
    if run_dir is not None:
        return {kind: run_dir / kind for kind in RECIPES}
    for number in range(1, 10_000):
        folders = {kind: Path("runs") / (name if number == 1 else f"{name}-{number}") for kind, name in RECIPES.items()}
        if not any(folder.exists() for folder in folders.values()):
            return folders
    raise UserError("there are ten thousand demos already", where="runs", fix="delete some, or give --run-dir")


def _train(story: Story, kind: str, folder: Path, *words: str) -> Tuned:
    _follow(story, RECIPES[kind], folder, *words)
    return Tuned(kind, folder)


def _follow(story: Story, recipe: str, folder: Path, *words: str) -> None:
    """The table of a run while it goes on."""
    from bloomery.plan.store import read_plan

    told = False
    with Trainer(folder) as trainer:
        for event in trainer.run("train", recipe, *words, "--run-dir", str(folder)):
            planned = isinstance(event, RunStarted) or (isinstance(event, Phase) and event.name == "length")
            plan = read_plan(folder / "plan.json") if planned else None
            if plan is not None and plan.train.steps is not None and not told:
                told = True
                tell_run(story, plan)
                story.begin_table(plan.train.steps)
            story.show(event)
    story.end_table()


def tell_run(story: Story, plan: "RunPlan") -> None:
    """What is trained, once the run's length is known."""
    from bloomery.data.shards.format import read_manifest

    manifest = read_manifest(plan.data.prepared)
    steps = f"{plan.train.steps:,} steps of {plan.train.tokens_per_step:,} tokens"
    if plan.adapter.kind == "none" and plan.objective.spec.reads_text:
        story.say("", steps)
        return
    trained = format_count(trained_parameters(plan))
    if plan.adapter.kind != "none":
        text = f"{manifest.train.documents:,} questions and answers, from the docstrings of Python's own library; "
        kept = f"{manifest.validation.documents} more are kept for the exam. Only the answers are learned"
        story.say("text", text, kept)
        story.say()
    rank = getattr(plan.adapter, "rank", None)
    what = "every weight" if rank is None else f"rank {rank} beside frozen weights"
    story.say("full" if rank is None else "lora", f"{what}: {trained} parameters learn, {steps}")


def trained_parameters(plan: "RunPlan") -> int:
    from bloomery.plan.estimate.states import mode_of, trained_count

    return trained_count(plan.model.config, mode_of(plan, plan.model.config))
