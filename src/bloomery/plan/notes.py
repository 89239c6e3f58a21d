"""Notes next to a plan: what it could not read, and what `train` does about it. Does not import torch."""

from collections.abc import Iterator
from pathlib import Path

from bloomery.hub import cached_model, is_hub_id, local_model
from bloomery.model.io.stored import is_bare
from bloomery.plan.gather import (
    absent,
    left_out_parts,
    models_of,
    unread_columns,
    unread_data_notes,
)
from bloomery.plan.made import ASSUMED
from bloomery.plan.types import RunPlan
from bloomery.random_models import is_random
from bloomery.recipe.schema import Recipe


def is_dataset_assumed(recipe: Recipe) -> bool:
    """Whether the recipe was made for a model alone, to be planned."""
    return Path(recipe.data.path or "").name == ASSUMED


def missing_datasets(recipe: Recipe, plan: RunPlan) -> list[str]:
    """Paths of the recipe's dataset without which `train` cannot start; those of the Hub begin with hub:."""
    return absent(recipe) if plan.dataset is None else []


def plan_notes(recipe: Recipe, plan: RunPlan, *, is_local: bool) -> Iterator[str]:
    """One sentence each. `is_local`: the plan is for this machine, so that the dataset is expected here."""
    models = models_of(recipe)
    for name in models:
        if cached_model(name) is None:
            yield f"{name} is not downloaded: shape from a table; `train` downloads it"
    for name in models:
        # `train` makes the weights of a random model.
        if not is_random(name) and not is_hub_id(name) and is_bare(local_model(name)):
            yield f"no weights in {name}: `bloomery train` would fail"
    yield from unread_data_notes(recipe)
    for columns in unread_columns(recipe):
        yield f"not read: {columns}"
    for note in left_out_parts(recipe):
        yield f"the chat template {note}"
    if is_dataset_assumed(recipe):
        sequences = f"packed sequences of {recipe.data.sequence_length:,} tokens"
        yield f"no --data: conversations in {sequences} are assumed; --data adds steps"
        return
    for path in missing_datasets(recipe, plan) if is_local else []:
        on_hub = path.startswith("hub:")
        fix = "`train` downloads it" if on_hub else "set data.path to your dataset before `train`"
        yield f"data.path does not exist: {path}; {fix}"
