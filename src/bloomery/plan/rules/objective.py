"""What an objective asks of a plan beside the step itself: a teacher, a reference, the share that is learned."""

from collections.abc import Iterator
from typing import Literal

from bloomery.core.choice import Choice
from bloomery.core.units import format_count
from bloomery.data.chat.templates import NONE
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.families.presets import known_config
from bloomery.plan.estimate.states import mode_of, setting_of
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.schema import Adapter, Distill, Lora, Objective, Peft, Recipe

Reference = Literal["none", "precomputed", "adapters"]


def reference_of(objective: Objective, adapter: Adapter) -> Choice[Reference]:
    """`precomputed`: once, before the first step. `adapters`: beside each step, from the base without its adapters."""
    if not objective.spec.reference:
        return Choice("none", f"{objective.kind} compares with no other model")
    if isinstance(adapter, Peft):
        return Choice("precomputed", f"what the base is without {adapter.method} is not known here")
    if not isinstance(adapter, Lora):
        return Choice("precomputed", "training changes the weights that the reference is computed with")
    if adapter.modules_to_save:
        return Choice("precomputed", f"{', '.join(adapter.modules_to_save)} learn beside the adapters")
    return Choice("adapters", "the base without its adapters is the model of the start, at no memory of its own")


def teacher_of(recipe: RunPlan) -> ModelConfig | None:
    return known_config(recipe.objective.teacher) if isinstance(recipe.objective, Distill) else None


def extra_forwards(recipe: Recipe | RunPlan) -> int:
    """Forwards of a step beside its own."""
    return 1 if reference_of(recipe.objective, recipe.adapter).value == "adapters" else 0


def setting(plan: RunPlan) -> str:
    """As `StepShape.setting`, of a step that was planned."""
    mode, away = mode_of(plan, plan.model.config), plan.train.offload_activations
    return setting_of(mode, extra_forwards=extra_forwards(plan), teacher=teacher_of(plan), offloading=away)


def objective_choices(
    recipe: Recipe, dataset: DatasetFacts | None, teacher: ModelConfig | None
) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what the objective means for this run."""
    reference = reference_of(recipe.objective, recipe.adapter)
    if reference.value == "adapters":
        yield "objective.reference", Choice("reference each step", f"{reference.reason}; a forward more a step")
    elif reference.value == "precomputed":
        yield "objective.reference", Choice("reference first", f"{reference.reason}; one forward over all of the data")
    if teacher is not None and isinstance(recipe.objective, Distill):
        reason = f"{recipe.objective.teacher} stays in memory beside the model"
        yield "objective.teacher", Choice(f"teacher of {format_count(parameter_count(teacher))}", reason)
    if dataset is not None:
        yield from _chat_choice(recipe, dataset)
    if dataset is not None and dataset.loss_share < 1:
        reason = "of the tokens are learned; the output layer runs on these alone"
        yield "data.chat.train_on", Choice(f"{dataset.loss_share:.0%} learned", f"{dataset.loss_share:.1%} {reason}")


def _chat_choice(recipe: Recipe, dataset: DatasetFacts) -> Iterator[tuple[str, Choice[str]]]:
    """Whether a chat template formats rows of a prompt and an answer; nothing of plain text."""
    key = "data.chat.template"
    if dataset.template:
        kept = f"; {key}={NONE} trains on texts as they are" if dataset.texts == "prompts" else ""
        reason = f"prompts are formatted as the user's turn and answers as the assistant's, in every data format{kept}"
        yield key, Choice(dataset.template, reason)
    elif dataset.texts == "whole":
        yield key, Choice(NONE, "pairs of whole texts without a prompt column are trained on as they are")
    elif dataset.texts == "prompts":
        reason = "the tokenizer has no chat template"
        if recipe.data.chat.template == NONE:
            reason = "the recipe sets none"
        elif recipe.objective.spec.reads_text:
            reason = "pretraining reads text"
        yield key, Choice(NONE, f"{reason}: prompt and answer are trained on as one text, without turns")
