"""Checkpoints of other runs that a recipe reads: held as long as its command lives. No torch."""

from collections.abc import Iterator
from contextlib import contextmanager

from bloomery.core.held_files import HeldFiles
from bloomery.core.text import expanded
from bloomery.infer.model_folder import MANIFEST
from bloomery.plan.gather import models_of
from bloomery.recipe.rewards import ModelReward
from bloomery.recipe.schema import Recipe


@contextmanager
def held_sources(*recipes: Recipe) -> Iterator[None]:
    """The model that training starts from, teacher, tokenizer and reward models stay, where they are checkpoints.

    Not only while they load: each restart after a crash, and a return to the start of the run, read them again. One
    that is missing, or was deleted just now, is reported by whoever reads it.
    """
    names = list[str]()
    for recipe in recipes:
        names += models_of(recipe)
        names += [reward.model for reward in recipe.rewards if isinstance(reward, ModelReward)]
        if recipe.tokenizer.from_ is not None:
            names.append(recipe.tokenizer.from_)
    with HeldFiles() as holds:
        for name in names:
            manifest = expanded(name) / MANIFEST
            if manifest.is_file():
                holds.take(manifest)
        yield
