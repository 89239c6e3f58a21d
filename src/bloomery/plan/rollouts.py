"""The rollouts of a plan: how many prompts, slots and micro-batches, and what they need of memory and time."""

from dataclasses import replace

from bloomery.plan.batch import MicroBatching
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.rollouts import (
    RolloutShape,
    completion_tokens_of,
    generation_seconds,
    reward_seconds,
    sampling_memory,
    with_stored_rollout,
)
from bloomery.plan.gather import Facts
from bloomery.plan.types import Estimate, LayoutPlan, ParallelPlan, RolloutPlan
from bloomery.recipe.objectives import Ppo, Rloo, Rollouts
from bloomery.recipe.schema import Recipe

# A forward is so much of a step: forward 1, gradients of inputs 1, and those of weights 1 where these train.
FORWARD_SHARE = {False: 1 / 3, True: 1 / 2}  # by whether the base is frozen


def plan_rollout(
    recipe: Recipe,
    facts: Facts,
    estimator: StepEstimator,
    micro_batching: MicroBatching,
    parallel: ParallelPlan | None,
    sequences_per_step: int,
) -> RolloutPlan:
    """Of the recipe's objective, on one device or in the chosen layout of several."""
    objective = recipe.objective
    assert isinstance(objective, Rollouts)
    layout = None if parallel is None else parallel.layout
    ranks = 1 if layout is None else layout.replicate * layout.shard
    num_completions = sequences_per_step * objective.steps_per_generation
    num_prompts = num_completions // objective.num_generations
    num_steps = objective.num_iterations * objective.steps_per_generation
    shape = _shape(recipe, facts, micro_batching, num_prompts=-(-num_prompts // ranks))
    if layout is not None and layout.shard > 1:
        shape = replace(shape, sharded=True)

    # 1. Memory: of a step that has the rollout beside it, and of the sampling, for which the step's own is free.
    training = with_stored_rollout(shape, micro_batching.memory)
    sampling = sampling_memory(shape, micro_batching.memory)

    # 2. Seconds of a step. Ranks on one CPU share its cores.
    rate = estimator.rate(shape.step)
    if rate is not None and layout is not None and not shape.step.on_gpu:
        rate = rate.shared(layout.replicate * layout.shard * layout.pipeline)
    update = _update_seconds(shape, estimator, layout)
    seconds: dict[str, Estimate] = {}
    if rate is not None and update is not None:
        seconds = {
            "generation": generation_seconds(shape, rate),
            "rewards": reward_seconds(shape, num_completions),
            "update": update,
        }
        if shape.scored_passes:
            share = FORWARD_SHARE[shape.step.mode.frozen] / objective.num_iterations
            seconds["log-probabilities"] = update.scaled(share * shape.scored_passes)
    return RolloutPlan(
        num_prompts=num_prompts,
        num_completions=num_completions,
        num_steps=num_steps,
        steps_per_pass=objective.steps_per_generation,
        slots=shape.slots,
        slot_tokens=shape.slot_tokens,
        prompt_tokens=shape.prompt_tokens,
        completion_tokens=shape.completion_tokens,
        micro_batches=shape.micro_batches(shape.completion_tokens.value),
        memory=sampling,
        training_memory=training,
        seconds=seconds,
    )


def _shape(
    recipe: Recipe, facts: Facts, micro_batching: MicroBatching, *, num_prompts: int
) -> RolloutShape:
    """Of a rank that samples the completions of so many prompts."""
    objective = recipe.objective
    assert isinstance(objective, Rollouts)
    dataset = facts.dataset
    # Without a dataset prompts may fill what completions leave of a sequence.
    longest_prompt = recipe.data.sequence_length - objective.max_completion_length
    prompt_tokens = longest_prompt / 2
    if dataset is not None and dataset.prompts:
        longest_prompt = min(longest_prompt, dataset.longest_prompt)
        prompt_tokens = min(dataset.tokens / dataset.prompts, float(longest_prompt))
    num_steps = objective.num_iterations * objective.steps_per_generation
    # Whether the divergence from the reference model is a part of the rewards, and whether tokens have values.
    has_penalty = isinstance(objective, Rloo | Ppo) and objective.kl_weight > 0
    has_values = objective.spec.value_head
    return RolloutShape(
        step=micro_batching.step,
        reward_models=facts.reward_models,
        num_prompts=num_prompts,
        num_generations=objective.num_generations,
        num_steps=num_steps,
        steps_per_pass=objective.steps_per_generation,
        prompt_tokens=prompt_tokens,
        longest_prompt=longest_prompt,
        completion_tokens=completion_tokens_of(objective, facts.config, fresh=facts.source is None),
        max_completion_length=objective.max_completion_length,
        filters=objective.top_p < 1 or objective.top_k is not None or objective.min_p > 0,
        scored_passes=int(num_steps > 1 or has_penalty or has_values) + int(has_penalty),
        has_values=has_values,
    )


def _update_seconds(
    shape: RolloutShape, estimator: StepEstimator, layout: LayoutPlan | None
) -> Estimate | None:
    """Of the packed micro-batches of a step; None where the device is unknown."""
    tokens = shape.completion_tokens

    def seconds(completion_tokens: float) -> Estimate | None:
        micro_batches = shape.micro_batches(completion_tokens)
        if layout is not None:
            step_seconds = layout.step_seconds
            return step_seconds and step_seconds.scaled(micro_batches / layout.accumulation)
        parts = estimator.step_parts(shape.step, micro_batches * shape.step.tokens_per_micro_batch)
        return None if parts is None else speed.total(parts)

    value = seconds(tokens.value)
    low = seconds(tokens.low)
    high = seconds(tokens.high)
    if value is None or low is None or high is None:
        return None
    return value.model_copy(update={"low": low.low, "high": high.high})
