"""A recipe planned for this machine, with the text that lies here."""

from pathlib import Path

from bloomery.data.prepare import prepared_folder
from bloomery.hardware.assume import with_gpu
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.specs import find_gpu
from bloomery.plan.corpus import corpus_of
from bloomery.plan.fetched import fetch
from bloomery.plan.resolve import resolve
from bloomery.plan.types import Plan
from bloomery.recipe.load import LoadedRecipe


def plan_here(
    loaded: LoadedRecipe, *, gpu: str | None = None, machine: Machine | None = None, gpus: int = 1, nodes: int = 1
) -> tuple[Plan, Machine]:
    """The plan and the machine it is for: `machine` (default: this one), or that with the named GPU of the table.

    Raises UserError.
    """
    fetch(loaded.recipe, weights=False)
    machine = machine or detect()
    if gpu is not None:
        machine = with_gpu(machine, find_gpu(gpu))
    prepared = prepared_folder(loaded, Path.cwd())
    corpus = corpus_of(loaded, prepared)
    return resolve(loaded, machine, prepared=prepared, corpus=corpus, gpus=gpus, nodes=nodes), machine
