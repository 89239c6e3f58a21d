"""A recipe planned for this machine, with the text that lies here."""

from collections.abc import Mapping
from pathlib import Path

from bloomery.data.prepare.prepare import prepared_folder
from bloomery.hardware.detect.detect import detect
from bloomery.hardware.environment import private_caches
from bloomery.hardware.fitting import with_gpu
from bloomery.hardware.machine import Machine
from bloomery.hardware.specs.specs import find_gpu
from bloomery.plan.gather import corpus_of, fetch
from bloomery.plan.resolve import checked_config, resolve
from bloomery.plan.types import CorpusFacts, Plan
from bloomery.recipe.load import LoadedRecipe

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}


def wanted(plan: Plan) -> dict[str, str]:
    """What must be set before torch is imported, whatever the user has set."""
    fixed = DETERMINISM if plan.train.deterministic and plan.train.device == "cuda" else {}
    return {**plan.environment, "OMP_NUM_THREADS": str(plan.train.threads), **fixed}


def child_environment(plan: Plan, own: Mapping[str, str]) -> dict[str, str]:
    """`own` with what is wanted, where `own` has nothing."""
    return private_caches(wanted(plan)) | dict(own)


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
