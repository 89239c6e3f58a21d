"""A recipe planned for this machine, with the local dataset."""

from collections.abc import Mapping
from pathlib import Path

from bloomery.data.prepare.prepare import prepared_folder
from bloomery.hardware.detect import detect
from bloomery.hardware.machine import Machine
from bloomery.hardware.profile import local_caches, with_gpu
from bloomery.hardware.specs import find_gpu
from bloomery.plan.gather import Facts, fetch, gather
from bloomery.plan.resolve import resolve
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import LoadedRecipe

DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "ROCBLAS_DEFAULT_ATOMICS_MODE": "0"}


def wanted(plan: RunPlan) -> dict[str, str]:
    """Environment variables to set before torch is imported, whatever the user has set."""
    fixed = DETERMINISM if plan.train.deterministic and plan.train.device == "cuda" else {}
    return {**plan.environment, "OMP_NUM_THREADS": str(plan.train.threads), **fixed}


def child_environment(plan: RunPlan, own: Mapping[str, str]) -> dict[str, str]:
    """`own`, with the variables of the plan that `own` does not set."""
    return local_caches(wanted(plan)) | dict(own)


def local_facts(loaded: LoadedRecipe, machine: Machine | None = None) -> Facts:
    """The facts for `machine` (default: this one), with the dataset as far as it is on this disk.

    Raises UserError for all that `train` refuses on any machine before its first step: in the recipe, the headers of
    the model's files, the first rows of the data.
    """
    fetch(loaded.recipe, weights=False)
    return gather(loaded, machine or detect(), prepared=prepared_folder(loaded, Path.cwd()))


def local_plan(
    loaded: LoadedRecipe, *, gpu: str | None = None, machine: Machine | None = None, gpus: int = 1, nodes: int = 1
) -> tuple[RunPlan, Facts]:
    """The plan and its facts, for `machine` (default: this one), or for that with the named GPU of the table.

    Raises UserError as `local_facts` does, and for settings that this machine does not support.
    """
    facts = local_facts(loaded, machine)
    if gpu is not None:
        facts = facts.on(with_gpu(facts.machine, find_gpu(gpu)))
    return resolve(loaded, facts, gpus=gpus, nodes=nodes), facts
