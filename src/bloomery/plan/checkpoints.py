"""How often a run saves, what a checkpoint takes, and what a kill between two of them loses."""

import math

from bloomery.core import Choice
from bloomery.core.device import can
from bloomery.core.units import Duration, counted, format_bytes, format_seconds
from bloomery.plan import lengths
from bloomery.plan.choices import ASKED
from bloomery.plan.estimate.saves import estimate_save
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import StepPictures
from bloomery.plan.estimate.towers import TrainedTower
from bloomery.plan.pictures import step_pictures
from bloomery.plan.types import CheckpointPlan, KillCost, LayoutPlan, RunPlan, SaveEstimate
from bloomery.recipe.schema import Recipe

# A save is cheap that takes at most this share of the time until the next: an adapter's always is.
CHEAP = 0.02


def choose_checkpoints(
    recipe: Recipe,
    model: TrainedModel,
    scale: lengths.Scale,
    *,
    precision: str,
    layout: LayoutPlan | None,
    nodes: int,
    eval_steps: int | None,
    pictures: StepPictures | None = None,
) -> Choice[CheckpointPlan]:
    """When the run saves. `eval_steps`: between two evaluations, None without any. Raises as `lengths.steps_of`.

    A time is one of the clock since the last save: no speed has to be known for it.
    """
    section = recipe.checkpoint
    async_save = section.async_save == "auto" or section.async_save
    if section.every.unit != "seconds":
        steps = lengths.checkpoint_steps(section.every, scale, evaluation=eval_steps)
        return Choice(
            CheckpointPlan(every_steps=steps.value, keep=section.keep, async_save=async_save),
            steps.reason,
        )

    # An evaluation that is the best so far saves its weights in any case. A whole checkpoint has optimizer states in
    # addition, and a kill then loses nothing before it: worth it where it takes little of the time to the next.
    size = _checkpoint_bytes(model, recipe.optimizer.kind, precision, pictures)
    ranks = layout.replicate * layout.shard * layout.pipeline if layout else 1
    save = estimate_save(
        size, model.largest_bytes(precision), ranks=ranks, hosts=nodes, copies=async_save
    ).seconds.value
    interval = section.every.amount
    evaluates = eval_steps is not None and recipe.data.validation != 0
    if eval_steps is not None and scale.step_seconds is not None:
        interval = min(interval, eval_steps * scale.step_seconds)
    at_best = evaluates and save <= CHEAP * interval
    reason = ASKED
    if "every" not in section.model_fields_set:
        reason = "by time, so that a kill costs no more than that"
    if evaluates:
        kind = "a checkpoint" if at_best else "the weights alone"
        time = format_seconds(save) if save >= 0.1 else "less than 0.1 s"
        reason += f"; the best evaluations save {kind}: {format_bytes(size)} take {time}"
    return Choice(
        CheckpointPlan(
            every_steps=None,
            every_seconds=section.every.amount,
            at_best=at_best,
            keep=section.keep,
            async_save=async_save,
        ),
        reason,
    )


def uncounted_interval(plan: RunPlan) -> Duration | None:
    """`checkpoint.every` in epochs or percent, where the run has no number of steps to convert it into: its dataset is
    not here yet, or it ends by the clock. None elsewhere: the interval is then one in steps or seconds.
    """
    if plan.lengths is None or plan.train.steps is not None:
        return None
    interval = plan.lengths.checkpoint
    is_counted = plan.dataset is not None and plan.dataset.sequences_per_epoch is not None
    is_uncounted = interval.unit == "percent" or (interval.unit == "epochs" and not is_counted)
    return interval if is_uncounted else None


def interval_text(checkpoint: CheckpointPlan, uncounted: Duration | None = None) -> str:
    """ "1,000 steps", "1 epoch", "10% of the run", "15 min", "15 min and at each best evaluation"."""
    if uncounted is not None:
        if uncounted.unit == "percent":
            return f"{uncounted} of the run"
        return str(uncounted) if uncounted.amount != 1 else "1 epoch"
    if checkpoint.every_steps is not None:
        return counted(checkpoint.every_steps, "steps")
    assert checkpoint.every_seconds is not None
    best = " and at each best evaluation" if checkpoint.at_best else ""
    return format_seconds(checkpoint.every_seconds) + best


def _checkpoint_bytes(
    model: TrainedModel, optimizer: str, precision: str, pictures: StepPictures | None
) -> float:
    """Of one checkpoint: its weights and optimizer states."""
    states = model.optimizer_bytes(optimizer, precision)
    if pictures is not None:
        states += TrainedTower(pictures, model, precision).state_bytes(optimizer)
    return weights_bytes(model, precision, pictures) + states


def weights_bytes(model: TrainedModel, precision: str, pictures: StepPictures | None) -> float:
    """Of the weights in a checkpoint: trainable parameters. Of a model that sees pictures, which is no adapter, they
    are the whole model, with what is frozen as it was published: mostly in half precision.
    """
    trainable = model.trainable_bytes(precision)
    if pictures is None:
        return trainable
    tower = TrainedTower(pictures, model, precision)
    trainable += tower.bytes
    if model.mode.target_modules:
        return trainable
    frozen = pictures.weights - tower.numbers_in_full
    frozen += model.weight_count if model.mode.freezes_model else 0
    return trainable + 2 * frozen


def checkpoint_bytes(plan: RunPlan, model: TrainedModel | None = None) -> float:
    """Of one checkpoint of a plan. `model`: that of the plan, if it is at hand."""
    model = model or TrainedModel.of(plan, plan.model.config)
    pictures = step_pictures(plan, plan.dataset)
    return _checkpoint_bytes(model, plan.optimizer.kind, plan.train.precision, pictures)


def planned_save(plan: RunPlan, model: TrainedModel | None = None) -> SaveEstimate:
    """Time and host memory of one checkpoint. `model`: that of the plan, if it is at hand."""
    model = model or TrainedModel.of(plan, plan.model.config)
    # One rank alone copies to memory that is not pinned.
    pins = plan.train.ranks > 1 and can(plan.train.device, "streams")
    return estimate_save(
        checkpoint_bytes(plan, model),
        model.largest_bytes(plan.train.precision),
        ranks=plan.train.ranks,
        hosts=plan.parallel.nodes if plan.parallel else 1,
        copies=plan.checkpoint.async_save,
        pinned_sizes=_pinned_sizes(plan, model) if pins else (),
    )


def _pinned_sizes(plan: RunPlan, model: TrainedModel) -> list[int]:
    """Bytes of the tensors that a rank hands in: its part of each weight, and of two states of each."""
    kind, precision = plan.optimizer.kind, plan.train.precision
    state_bytes = model.optimizer_bytes(kind, precision) / max(1, model.trainable_count)
    weight_bytes = model.trainable_bytes(precision) / max(1, model.trainable_count)
    sizes = list[int]()
    for shape in (*model.trained.values(), *model.adapter.values()):
        values = math.prod(shape) / plan.train.ranks
        sizes += [math.ceil(values * bytes_) for bytes_ in (weight_bytes, *[state_bytes / 2] * 2)]
    return sizes


def kill_cost(plan: RunPlan) -> KillCost:
    """What a kill just before a checkpoint loses: the interval, or the run where none comes before its end."""
    steps = plan.checkpoint.every_steps
    seconds = plan.checkpoint.every_seconds
    uncounted = uncounted_interval(plan)
    if uncounted is not None:
        steps = None
        if plan.train.seconds is None:  # a share of a run of unknown length
            epochs = plan.epochs or math.inf
            run = 100 if uncounted.unit == "percent" else epochs
            return KillCost(seconds=None, steps=None, whole_run=uncounted.amount >= run)
        if uncounted.unit == "percent":  # of a wall-time run: by the clock
            seconds = uncounted.amount / 100 * plan.train.seconds
    if seconds is None and steps is not None and plan.step_seconds is not None:
        seconds = steps * plan.step_seconds.value

    # The whole run, where its end comes first.
    run_steps = plan.train.steps
    run_seconds = None if plan.seconds is None else plan.seconds.value
    if steps is not None and run_steps is not None:
        whole_run = steps >= run_steps
    else:
        whole_run = seconds is not None and run_seconds is not None and seconds >= run_seconds
    if whole_run:
        return KillCost(seconds=run_seconds, steps=run_steps, whole_run=True)
    return KillCost(seconds=seconds, steps=steps, whole_run=False)
