"""`bloomery demo chat`: fine-tune the model of `bloomery demo` with LoRA and in full, and compare the results."""

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
class FineTuned:
    """A run of this demo."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder

    @property
    def plan(self) -> "RunPlan":
        from bloomery.plan.store import read_plan

        return read_plan(self.folder / "plan.json")


def demonstrate(*, run_dir: Path | None, as_json: bool) -> dict[str, Any]:
    """The whole demo; returns the document of `--json`. Raises UserError."""
    from bloomery.cli.demo.chat_evaluation import evaluate_chat_demo
    from bloomery.hardware.detect.detect import detect

    began = time.time()
    story = Story(to_stderr=as_json)
    story.write("Bloomery chat demo: fine-tune the model of `bloomery demo` with LoRA and in full")
    story.write(f"{describe(detect())} · no download")
    story.write()
    base = find_base() or train_base(story)
    _show_base(story, base)
    folders = free_folders(run_dir)
    lora = _train(story, "lora", folders["lora"], f"model.from={base}")
    plan = lora.plan
    same = (f"train.max_steps={plan.train.steps}", f"data.prepared={plan.data.prepared}")
    full = _train(story, "full", folders["full"], f"model.from={base}", *same)
    return evaluate_chat_demo(story, base, [lora, full], began)


def find_base() -> Path | None:
    """The export of the newest finished run of `bloomery demo`."""
    from bloomery.runs.names import all_runs

    for folder in reversed(all_runs()):
        events = read_events(folder / "events.jsonl") if (folder / "events.jsonl").is_file() else []
        ended = [event for event in events if isinstance(event, RunEnded)]
        name = folder.name == "demo" or (folder.name.startswith("demo-") and folder.name[5:].isdecimal())
        if name and ended and ended[-1].status == "done":
            return exported(folder)
    return None


def exported(run: Path) -> Path:
    """The export of a run, created if missing."""
    from bloomery.export.layouts import export
    from bloomery.train.model_folder import model_folder

    folder = run / "export" / "hf"
    if not folder.exists():
        export(model_folder(run, "last"), folder)
    return folder.absolute()


def train_base(story: Story) -> Path:
    """The run of `bloomery demo` without kill and evaluation."""
    folder = Path("runs/demo")
    if folder.exists():
        fix = f"`bloomery resume {folder}`, or delete the folder"
        raise UserError("the run of `bloomery demo` is not finished", where=str(folder), fix=fix)
    story.write("base", "no finished run of `bloomery demo` in runs/: training its model first")
    _follow(story, "demo", folder)
    return exported(folder)


def _show_base(story: Story, base: Path) -> None:
    from bloomery.model.counting import parameter_count
    from bloomery.model.families.presets import read_config

    size = format_count(parameter_count(read_config(base)))
    where = base.relative_to(Path.cwd()) if base.is_relative_to(Path.cwd()) else base
    story.write("base", f"{where}: {size} parameters, pretrained on Python source code")


def free_folders(run_dir: Path | None) -> dict[str, Path]:
    """runs/demo-chat-lora and runs/demo-chat-full, with a number if they exist: no run is overwritten."""
    if run_dir is not None:
        return {kind: run_dir / kind for kind in RECIPES}
    for number in range(1, 10_000):
        folders = {kind: Path("runs") / (name if number == 1 else f"{name}-{number}") for kind, name in RECIPES.items()}
        if not any(folder.exists() for folder in folders.values()):
            return folders
    raise UserError("10,000 runs of this demo exist", where="runs", fix="delete some, or set --run-dir")


def _train(story: Story, kind: str, folder: Path, *overrides: str) -> FineTuned:
    _follow(story, RECIPES[kind], folder, *overrides)
    return FineTuned(kind, folder)


def _follow(story: Story, recipe: str, folder: Path, *overrides: str) -> None:
    """Trains and prints the table of the run."""
    from bloomery.plan.store import read_plan

    shown = False
    with Trainer(folder) as trainer:
        for event in trainer.run("train", recipe, *overrides, "--run-dir", str(folder)):
            planned = isinstance(event, RunStarted) or (isinstance(event, Phase) and event.name == "length")
            plan = read_plan(folder / "plan.json") if planned else None
            if plan is not None and plan.train.steps is not None and not shown:
                shown = True
                _show_run(story, plan)
                story.begin_table(plan.train.steps)
            story.show(event)
    story.end_table()


def _show_run(story: Story, plan: "RunPlan") -> None:
    """Dataset and trainable parameters, once the number of steps is known."""
    from bloomery.data.shards.format import read_manifest

    steps = f"{plan.train.steps:,} steps x {plan.train.tokens_per_step:,} tokens"
    if plan.adapter.kind == "none" and plan.objective.spec.reads_text:
        story.write("", steps)
        return
    trainable = f"{format_count(trainable_parameters(plan))} trainable parameters, {steps}"
    if plan.adapter.kind == "none":
        story.write("full", f"full fine-tuning: {trainable}")
        return
    manifest = read_manifest(plan.data.prepared)
    train, validation = manifest.train.documents, manifest.validation.documents
    pairs = f"{train:,} prompts and responses from the docstrings of Python's standard library"
    story.write("dataset", f"{pairs}; {validation} more are the validation set", "trains on the responses only")
    story.write()
    rank = getattr(plan.adapter, "rank", None)
    story.write("lora", f"LoRA, rank {rank}, base weights frozen: {trainable}")


def trainable_parameters(plan: "RunPlan") -> int:
    from bloomery.plan.estimate.states import mode_of, trained_count

    return trained_count(plan.model.config, mode_of(plan, plan.model.config))
