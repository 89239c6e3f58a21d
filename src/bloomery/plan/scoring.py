"""Devices of each host that hold the teacher and the reward models while the others train: their memory and time."""

from bloomery.core.errors import UserError
from bloomery.core.units import counted
from bloomery.facts.config import ModelConfig
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.scoring import scoring_memory, scoring_seconds
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.types import MemoryEstimate, ScoringPlan
from bloomery.recipe.rewards import ModelReward
from bloomery.recipe.schema import Recipe


def refuse_scoring(recipe: Recipe, teacher: ModelConfig | None, *, are_unequal: bool) -> None:
    """Raises UserError for scoring devices without anything to score with, and for models that cannot be there.

    `teacher`: None where there is none, or its config is not known yet. `are_unequal`: the GPUs are of several models.
    """
    scoring = recipe.parallel.scoring_devices
    if scoring == 0:
        return
    where = f"parallel.scoring_devices={scoring}"
    taught_by = recipe.objective.taught_by
    if taught_by is None and not any(isinstance(reward, ModelReward) for reward in recipe.rewards):
        raise UserError(
            f"{counted(scoring, 'devices')} would have nothing to score with: the recipe has neither a teacher that is"
            " another model, nor reward models",
            where=where,
            fix="set parallel.scoring_devices=0, or objective.teacher to another model",
            code=2,
        )
    if taught_by is not None and taught_by.stream == "layers":
        raise UserError(
            "not supported: a teacher whose layers stream, on a device that only scores",
            where=f"{where}, objective.teacher_stream=layers",
            fix="set objective.teacher_stream=off and objective.teacher_quantize=nf4, or parallel.scoring_devices=0",
            code=2,
        )
    if teacher is not None and teacher.transformers_backend is not None:
        raise UserError(
            "not supported: layers of transformers on a device that only scores",
            where=f"{where}, objective.teacher",
            fix="set parallel.scoring_devices=0, or choose another teacher",
            code=2,
        )
    if are_unequal:
        raise UserError(
            "not supported yet: devices that score among unequal GPUs",
            where=where,
            fix="name GPUs of one model with --devices, or set parallel.scoring_devices=0",
            code=2,
        )


def plan_scoring(
    recipe: Recipe,
    estimator: StepEstimator,
    step: StepShape,
    training: MemoryEstimate,
    *,
    reward_models: tuple[ModelConfig, ...],
    rank_sequences: int,
    ranks: int,
) -> ScoringPlan | None:
    """None without such devices. `training`: of a device that trains. `rank_sequences`: of a step, on each of the
    `ranks` of a host.
    """
    devices = recipe.parallel.scoring_devices
    if devices == 0:
        return None
    limit = estimator.limit
    if not step.on_gpu:
        # All processes of a CPU share its memory.
        limit = max(0.0, (estimator.limit - ranks * training.total) / devices)
    rate = estimator.rate(step)
    seconds = None
    if rate is not None and step.teacher_place != "device":
        seconds = scoring_seconds(step, rate, rank_sequences * step.sequence_length)
    memory = scoring_memory(step, reward_models, limit=limit)
    return ScoringPlan(devices=devices, memory=memory, seconds=seconds)
