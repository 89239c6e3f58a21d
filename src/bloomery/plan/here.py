"""A recipe planned for this machine, with the text that lies here."""

from pathlib import Path

from bloomery.data.prepare import prepared_folder
from bloomery.hardware.assume import with_gpu
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.specs import find_gpu
from bloomery.plan.corpus import corpus_of
from bloomery.plan.fetched import fetch
from bloomery.plan.resolve import checked_config, resolve
from bloomery.plan.types import CorpusFacts, Plan
from bloomery.recipe.load import LoadedRecipe


def checked_corpus(loaded: LoadedRecipe) -> CorpusFacts | None:
    """The facts of the text, as far as it lies here. Raises UserError for all that `train` would refuse on any machine
    before its first step: of the recipe, the headers of the model's files, the first rows of the text.
    """
    fetch(loaded.recipe, weights=False)
    corpus = corpus_of(loaded, prepared_folder(loaded, Path.cwd()))
    checked_config(loaded.recipe, corpus)
    return corpus


def plan_here(
    loaded: LoadedRecipe,
    *,
    gpu: str | None = None,
    machine: Machine | None = None,
    gpus: int = 1,
    nodes: int = 1,
) -> tuple[Plan, Machine]:
    """The plan and the machine it is for: `machine` (default: this one), or that with the named GPU of the table.

    Raises UserError as `checked_corpus` does, and for what this machine cannot do.
    """
    corpus = checked_corpus(loaded)
    machine = machine or detect()
    if gpu is not None:
        machine = with_gpu(machine, find_gpu(gpu))
    prepared = prepared_folder(loaded, Path.cwd())
    return resolve(loaded, machine, prepared=prepared, corpus=corpus, gpus=gpus, nodes=nodes), machine
