"""The README of an exported model: what it is, what made it, how good it is, how to open it (card.md.jinja)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from bloomery.core.units import format_count, format_seconds
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families.registry import architecture_of
from bloomery.monitor.events import EvalDone, RunStarted, StepDone, read_events
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.recipe.schema import Recipe


@dataclass(frozen=True)
class Training:
    """The training of an exported checkpoint, read from its run folder."""

    recipe: Recipe
    plan: RunPlan | None
    step: int
    tokens: int
    seconds: float
    loss: float | None  # of the last step
    per: str  # the loss unit: RunStarted.loss_unit
    device: str
    evaluation: EvalDone | None


@dataclass(frozen=True)
class Merge:
    """A merge of whole models: the name and weight of each, and what the method takes besides."""

    method: str
    models: tuple[tuple[str, float], ...]
    base: str | None = None
    density: float | None = None


def training_of(checkpoint: Path) -> Training | None:
    """None when the folder is no checkpoint of a run."""
    run, step = checkpoint.parent.parent, checkpoint.name.removeprefix("step-")
    if checkpoint.parent.name != "checkpoints" or not step.isdecimal() or not (run / "recipe.yaml").is_file():
        return None
    steps: dict[int, StepDone] = {}
    evaluation, device, per = None, "", "token"
    for event in read_events(run / "events.jsonl"):
        if isinstance(event, RunStarted):
            device, per = event.device, event.loss_unit
        elif isinstance(event, StepDone) and event.step <= int(step):
            steps[event.step] = event  # after a resume the last event of a step counts
        elif isinstance(event, EvalDone) and event.step <= int(step):
            evaluation = event
    last = steps[max(steps)] if steps else None
    plan = read_plan(run / "plan.json") if (run / "plan.json").is_file() else None
    return Training(
        recipe=load_recipe(run / "recipe.yaml").recipe, plan=plan, step=int(step), tokens=last.tokens if last else 0,
        seconds=sum(event.step_seconds for event in steps.values()), loss=last.loss if last else None,
        per=per, device=device, evaluation=evaluation,
    )  # fmt: skip


def model_card(
    name: str, config: ModelConfig, training: Training | None, *, base: str | None = None, merge: Merge | None = None
) -> str:
    """Markdown with the metadata block that model hubs read. `base`: the model that an adapter is for."""
    if merge is not None:
        training = None  # it is the training of one of the models
    task = "text-classification" if config.head == "values" else "text-generation"
    metadata = ModelCardData(
        library_name="transformers" if base is None else "peft", pipeline_tag=task,
        tags=["bloomery", "merge"] if merge else ["bloomery"],
        base_model=None if base is None or base.startswith("/") else base,
    )  # fmt: skip
    fields: dict[str, Any] = {
        "name": name, "config": config, "training": training, "merge": merge,
        "base": None if base is None else public(base),
        "size": format_count(parameter_count(config)), "architecture": architecture_of(config),
    }  # fmt: skip
    if training is not None:
        recipe, plan = training.recipe, training.plan
        paths = [recipe.data.path] if recipe.data.path is not None else [source.path for source in recipe.data.sources]
        names = ", ".join(Path(path).name for path in paths) or "prepared shards"
        fields |= {
            "plan": plan, "objective": (recipe if plan is None else plan).objective.kind,
            "data_names": names if recipe.data.builtin is None else f"builtin {recipe.data.builtin}",
            "tokens": format_count(training.tokens), "seconds": format_seconds(training.seconds),
            "unit": "nats per token" if training.per == "token" else f"per {training.per}",
            "started_from": None if recipe.model.from_ is None else public(recipe.model.from_),
            "evaluation": training.evaluation if training.evaluation and training.evaluation.loss is not None else None,
        }  # fmt: skip
    template = str(Path(__file__).with_name("card.md.jinja"))
    return str(ModelCard.from_template(metadata, template_path=template, **fields))


def public(model: str) -> str:
    """The id on the Hub, or the last part of a path: a whole path could identify the author."""
    return Path(model).name if model.startswith(("/", ".", "~")) else model
