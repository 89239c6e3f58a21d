"""The rollouts of a plan: how many prompts, slots and micro-batches, and what they need of memory and time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from bloomery.facts.counting import parameter_count
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.fabric import Fabric, gather_seconds
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit, on_device
from bloomery.plan.estimate.rollouts import (
    RolloutShape,
    completion_tokens_of,
    generation_seconds,
    reward_seconds,
    sampling_memory,
    whole_copy_bytes,
    with_stored_rollout,
)
from bloomery.plan.estimate.stages import KEPT_PARTS, most_kept_bytes
from bloomery.plan.estimate.step import StepShape
from bloomery.plan.gather import Facts
from bloomery.plan.types import DatasetFacts, Estimate, MemoryEstimate, RolloutPlan, RunPlan
from bloomery.recipe.objectives import GroupRollouts, Ppo, Rloo, Rollouts
from bloomery.recipe.schema import Recipe

# Of the prompts that dynamic sampling draws, the share whose completions all have one reward: none, half, all. It is
# unknown until some are sampled, and grows as a model learns (DAPO, arXiv:2503.14476, figure 3b).
ALIKE = (0.0, 0.5, 1.0)

# A forward is so much of a step: forward 1, gradients of inputs 1, and those of weights 1 where these train.
FORWARD_SHARE = {False: 1 / 3, True: 1 / 2}  # by whether the base is frozen


@dataclass(frozen=True, kw_only=True)
class RolloutMoments:
    """The moments of a run with rewards at which its memory can peak: of each rank, in any split of the devices.

    A candidate (a micro-batch, a layout, a place of the reference model) is judged by all of them.
    `sequences_per_step`: of all ranks. `fresh`: the model starts with fresh weights.
    """

    objective: Rollouts
    sequence_length: int
    sequences_per_step: int
    dataset: DatasetFacts | None
    fresh: bool
    reward_parameters: int

    @classmethod
    def of(cls, recipe: Recipe, facts: Facts, sequences_per_step: int) -> "RolloutMoments | None":
        """None where steps read the dataset."""
        if not isinstance(recipe.objective, Rollouts):
            return None
        return cls(
            objective=recipe.objective,
            sequence_length=recipe.data.sequence_length,
            sequences_per_step=sequences_per_step,
            dataset=facts.dataset,
            fresh=facts.source is None,
            # Else they are on devices that only score.
            reward_parameters=sum(map(parameter_count, facts.reward_models))
            if recipe.parallel.scoring_devices == 0
            else 0,
        )

    @classmethod
    def of_plan(cls, plan: RunPlan, step: StepShape) -> "RolloutMoments | None":
        """Those of a finished plan. `step`: its own."""
        if plan.rollout is None:
            return None
        assert isinstance(plan.objective, Rollouts)
        reward_bytes = plan.rollout.memory.parts.get("reward models", 0.0)
        return cls(
            objective=plan.objective,
            sequence_length=plan.data.sequence_length,
            sequences_per_step=plan.train.tokens_per_step // plan.data.sequence_length,
            dataset=plan.dataset,
            fresh=plan.model.source is None,
            reward_parameters=round(reward_bytes / step.element_bytes),
        )

    @property
    def num_completions(self) -> int:
        """Of a rollout, all ranks together."""
        return self.sequences_per_step * self.objective.steps_per_generation

    @property
    def num_prompts(self) -> int:
        return self.num_completions // self.objective.num_generations

    @property
    def num_steps(self) -> int:
        """Steps that train on a rollout."""
        return self.objective.num_iterations * self.objective.steps_per_generation

    def sampled_prompts(self, share_alike: float) -> list[int]:
        """Of each round of a rollout, where so many of the prompts have completions of one reward: the first one, and
        those that dynamic sampling adds.
        """
        objective = self.objective
        if not isinstance(objective, GroupRollouts):
            return [self.num_prompts]
        rounds = [math.ceil(self.num_prompts * objective.oversampling)]
        if objective.dynamic_sampling:
            for _ in range(objective.max_resample_times):
                missing = self.num_prompts - math.floor(sum(rounds) * (1 - share_alike))
                if missing <= 0:
                    break
                rounds.append(missing)
        return rounds

    def shape(self, step: StepShape, split: MeshSplit = ONE_DEVICE) -> RolloutShape:
        """The first round of the rollout of the rank that samples most completions. All ranks sample, whatever they
        train on.
        """
        objective = self.objective
        dataset = self.dataset
        # Without a dataset prompts may fill what completions leave of a sequence.
        longest_prompt = self.sequence_length - objective.max_completion_length
        prompt_tokens = longest_prompt / 2
        if dataset is not None and dataset.prompts:
            longest_prompt = min(longest_prompt, dataset.longest_prompt)
            prompt_tokens = min(dataset.tokens / dataset.prompts, float(longest_prompt))
        # Whether the divergence from the reference model is a part of the rewards, and whether tokens have values.
        has_penalty = isinstance(objective, Rloo | Ppo) and objective.kl_weight > 0
        has_values = objective.spec.value_head
        return RolloutShape(
            step=step,
            reward_parameters=self.reward_parameters,
            num_prompts=prompts_of_rank(self.sampled_prompts(0.0)[0], split),
            trained_completions=-(-self.num_completions // split.data_parallel),
            all_completions=self.num_completions,
            num_generations=objective.num_generations,
            num_steps=self.num_steps,
            steps_per_pass=objective.steps_per_generation,
            prompt_tokens=prompt_tokens,
            longest_prompt=longest_prompt,
            completion_tokens=completion_tokens_of(objective, step.config, fresh=self.fresh),
            max_completion_length=objective.max_completion_length,
            filters=objective.top_p < 1 or objective.top_k is not None or objective.min_p > 0,
            scored_passes=int(self.num_steps > 1 or has_penalty or has_values) + int(has_penalty),
            has_values=has_values,
            whole_copy=split.shard * split.pipeline * split.expert > 1,
        )

    def memories(
        self, step: StepShape, step_memory: MemoryEstimate, split: MeshSplit = ONE_DEVICE
    ) -> tuple[MemoryEstimate, MemoryEstimate]:
        """Of a step that has the rollout beside it, and of the sampling, for which the step's own memory is free.

        `step_memory`: of the step alone.
        """
        shape = self.shape(step, split)
        training = with_stored_rollout(shape, step_memory)
        # The stage that needs most in a step may keep less than another one while both sample.
        if split.pipeline > 1:
            parts = {
                name: size for name, size in step_memory.parts.items() if name not in KEPT_PARTS
            }
            parts |= most_kept_bytes(on_device(step, split), split)
            step_memory = step_memory.model_copy(update={"parts": parts})
        return training, sampling_memory(shape, step_memory)

    def peak(
        self, step: StepShape, step_memory: MemoryEstimate, split: MeshSplit = ONE_DEVICE
    ) -> MemoryEstimate:
        """The moment that needs most."""
        return max(self.memories(step, step_memory, split), key=lambda memory: memory.total)

    def packed_sequences(self, step: StepShape, split: MeshSplit = ONE_DEVICE) -> int:
        """The sequences of a step that a rank computes, with completions packed into micro-batches."""
        shape = self.shape(step, split)
        return shape.micro_batches(shape.completion_tokens.value) * step.micro_batch_size


def plan_rollout(
    moments: RolloutMoments,
    estimator: StepEstimator,
    step: StepShape,
    step_memory: MemoryEstimate,
    *,
    split: MeshSplit,
    step_seconds: Estimate | None,
    fabric: Fabric | None = None,
) -> RolloutPlan:
    """On one device or in the chosen split of several.

    `step_memory`: of the step alone. `step_seconds`: of its packed micro-batches, None where the device is unknown.
    `fabric`: over which several devices gather weights.
    """
    shape = moments.shape(step, split)
    training, sampling = moments.memories(step, step_memory, split)

    # Seconds of a step. Ranks on one CPU share its cores.
    rate = estimator.rate(step)
    if rate is not None and not step.on_gpu:
        rate = rate.shared(split.replicate * split.shard * split.pipeline)

    def update_seconds(completion_tokens: float) -> Estimate | None:
        """Of the micro-batches of a step, with completions of that mean length packed into them."""
        micro_batches = shape.micro_batches(completion_tokens)
        if split != ONE_DEVICE:
            usual = shape.micro_batches(shape.completion_tokens.value)
            return step_seconds and step_seconds.scaled(micro_batches / usual)
        parts = estimator.step_parts(step, micro_batches * step.tokens_per_micro_batch)
        return None if parts is None else speed.total(parts)

    update = _with_ends_of(shape.completion_tokens, update_seconds)
    seconds: dict[str, Estimate] = {}

    def seconds_of_round(num_prompts: int) -> Estimate | None:
        of_round = replace(shape, num_prompts=prompts_of_rank(num_prompts, split))
        return None if rate is None else generation_seconds(of_round, rate, estimator.host_link)

    generation = _of_all_rounds(moments, seconds_of_round)
    rewards = _of_all_rounds(
        moments,
        lambda num_prompts: reward_seconds(shape, num_prompts * moments.objective.num_generations),
    )
    if generation is not None and rewards is not None and update is not None:
        seconds = {
            "generation": generation,
            "rewards": rewards,
            "update": update,
        }
        if shape.whole_copy and fabric is not None:
            gathering = gather_seconds(
                whole_copy_bytes(shape), fabric, calls=len(step.model.shapes)
            )
            gathered = Estimate(value=gathering, low=gathering, high=gathering, origin="table")
            seconds["gathered weights"] = gathered.scaled(1 / shape.num_steps)
        if shape.scored_passes:
            share = FORWARD_SHARE[step.mode.frozen] / moments.objective.num_iterations
            seconds["log-probabilities"] = update.scaled(share * shape.scored_passes)
    return RolloutPlan(
        num_prompts=moments.num_prompts,
        sampled_prompts=tuple(sum(moments.sampled_prompts(share)) for share in ALIKE),
        num_completions=moments.num_completions,
        num_steps=moments.num_steps,
        steps_per_pass=shape.steps_per_pass,
        slots=shape.slots,
        slot_tokens=shape.slot_tokens,
        prompt_tokens=shape.prompt_tokens,
        completion_tokens=shape.completion_tokens,
        micro_batches=shape.micro_batches(shape.completion_tokens.value),
        memory=sampling,
        training_memory=training,
        seconds=seconds,
    )


def prompts_of_rank(num_prompts: int, split: MeshSplit) -> int:
    """Of the rank that samples most of them."""
    return -(-num_prompts // (split.replicate * split.shard * split.pipeline))


def _of_all_rounds(
    moments: RolloutMoments, seconds: Callable[[int], Estimate | None]
) -> Estimate | None:
    """The sum over the rounds of a rollout: fewest of the fastest, and most of the slowest. `seconds`: by prompts."""
    low, value, high = (
        [seconds(num_prompts) for num_prompts in moments.sampled_prompts(share)] for share in ALIKE
    )
    if None in low + value + high:
        return None
    return Estimate(
        value=sum(of_round.value for of_round in value if of_round is not None),
        low=sum(of_round.low for of_round in low if of_round is not None),
        high=sum(of_round.high for of_round in high if of_round is not None),
        origin="table",
    )


def _with_ends_of(tokens: Estimate, seconds: Callable[[float], Estimate | None]) -> Estimate | None:
    """The seconds of so many tokens, from the fastest of the fewest to the slowest of the most."""
    value = seconds(tokens.value)
    low = seconds(tokens.low)
    high = seconds(tokens.high)
    if value is None or low is None or high is None:
        return None
    return value.model_copy(update={"low": low.low, "high": high.high})
