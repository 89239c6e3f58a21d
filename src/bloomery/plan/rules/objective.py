"""The parts of an objective in a plan: teacher, reference model, share of loss tokens."""

from collections.abc import Iterator
from typing import Literal

from bloomery.core import Choice
from bloomery.core.units import format_count
from bloomery.data.tokenizer.templates import NONE
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.presets import known_config
from bloomery.plan.estimate.states import mode_of, setting_of
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.schema import Adapter, Distill, Lora, Objective, Peft, Recipe

Reference = Literal["none", "precomputed", "adapters"]


def reference_of(objective: Objective, adapter: Adapter) -> Choice[Reference]:
    """`precomputed`: before the first step. `adapters`: in each step, by the base model without its adapters."""
    if not objective.spec.reference:
        return Choice("none", f"{objective.kind} has no reference model")
    if isinstance(adapter, Peft):
        return Choice("precomputed", f"the base model without {adapter.method} is not available in a step")
    if not isinstance(adapter, Lora):
        return Choice("precomputed", "training changes the weights of the reference model")
    if adapter.modules_to_save:
        return Choice("precomputed", f"{', '.join(adapter.modules_to_save)} are trainable, not only adapters")
    return Choice("adapters", "the base model without its adapters is the reference model, without extra memory")


def teacher_of(recipe: RunPlan) -> ModelConfig | None:
    return known_config(recipe.objective.teacher) if isinstance(recipe.objective, Distill) else None


def extra_forwards(recipe: Recipe | RunPlan) -> int:
    """Additional forward passes of a step."""
    return 1 if reference_of(recipe.objective, recipe.adapter).value == "adapters" else 0


def setting(plan: RunPlan) -> str:
    """`StepShape.setting` of a plan."""
    mode, away = mode_of(plan, plan.model.config), plan.train.offload_activations
    return setting_of(mode, extra_forwards=extra_forwards(plan), teacher=teacher_of(plan), offloading=away)


def objective_choices(
    recipe: Recipe, dataset: DatasetFacts | None, teacher: ModelConfig | None
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the choices of the objective."""
    reference = reference_of(recipe.objective, recipe.adapter)
    if reference.value == "adapters":
        yield "objective.reference", Choice("reference per step", f"{reference.reason}; one more forward pass per step")
    elif reference.value == "precomputed":
        yield (
            "objective.reference",
            Choice("precomputed reference", f"{reference.reason}; one forward pass over the dataset"),
        )
    if teacher is not None and isinstance(recipe.objective, Distill):
        reason = f"{recipe.objective.teacher} stays in memory next to the model"
        yield "objective.teacher", Choice(f"teacher of {format_count(parameter_count(teacher))}", reason)
    if dataset is not None:
        yield from _chat_choice(recipe, dataset)
    if dataset is not None and dataset.loss_share < 1:
        reason = "of the tokens are loss tokens; the output layer runs on these alone"
        yield (
            "data.chat.train_on",
            Choice(f"{dataset.loss_share:.0%} loss tokens", f"{dataset.loss_share:.1%} {reason}"),
        )


def _chat_choice(recipe: Recipe, dataset: DatasetFacts) -> Iterator[tuple[str, Choice[str]]]:
    """Whether a chat template formats prompts and responses; nothing for plain text."""
    key = "data.chat.template"
    if dataset.template:
        kept = f"; {key}={NONE} trains on the plain text" if dataset.texts == "prompts" else ""
        reason = f"formats prompts as user and responses as assistant messages, in every data format{kept}"
        yield key, Choice(dataset.template, reason)
    elif dataset.texts == "whole":
        yield key, Choice(NONE, "pairs without a prompt column are plain text")
    elif dataset.texts == "prompts":
        reason = "the tokenizer has no chat template"
        if recipe.data.chat.template == NONE:
            reason = "set in the recipe"
        elif recipe.objective.spec.reads_text:
            reason = "pretraining reads text"
        yield key, Choice(NONE, f"{reason}: prompt and response are one plain text, without messages")
