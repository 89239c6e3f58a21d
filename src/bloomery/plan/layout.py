"""How a step runs on its devices: micro-batches, what streams, the layout over several devices, memory and time."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, final

from bloomery.core import Choice
from bloomery.plan import (
    batch,
    mesh,
    rollouts,
    streaming,
    support_matrix,
    teachers,
    unsupported_layouts,
)
from bloomery.plan.choices import most_loss_tokens
from bloomery.plan.estimate import speed
from bloomery.plan.estimate.measured import StepEstimator
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.estimate.step import StepShape, Stream
from bloomery.plan.gather import Facts
from bloomery.plan.types import Estimate, MemoryEstimate, ParallelPlan, RolloutPlan, StreamPlan
from bloomery.recipe.schema import Recipe


class StepLayout(NamedTuple):
    """How a step runs on its devices, with the sampling of its completions.

    `seconds`: of the step, None where the device's speed is unknown. `parallel`: every layout over several devices,
    None on one. `stream_plan`: None where all weights are on the device.
    """

    micro_batching: batch.MicroBatching
    seconds: Estimate | None
    parallel: ParallelPlan | None
    rollout: RolloutPlan | None
    stream: Choice[Stream]
    stream_plan: StreamPlan | None
    teacher_forms: tuple[teachers.TeacherForm, ...]


@final
@dataclass(frozen=True, kw_only=True)
class DeviceWorkload:
    """The step of one device, as `MeshWorkload` is that of several. `rollout_moments`: None without completions."""

    estimator: StepEstimator
    sequences_per_step: int
    rollout_moments: rollouts.RolloutMoments | None

    def estimate(self, step: StepShape) -> Estimate | None:
        """The time of a step in these micro-batches; None where the device's speed is unknown."""
        sequences = self.sequences_per_step
        if self.rollout_moments is not None:
            sequences = self.rollout_moments.packed_sequences(step)
        parts = self.estimator.step_parts(step, sequences * step.sequence_length)
        return speed.total(parts) if parts else None

    def seconds(self, step: StepShape) -> float | None:
        estimate = self.estimate(step)
        return None if estimate is None else estimate.value

    def peak(self, step: StepShape) -> MemoryEstimate:
        """The memory of a run whose steps are like this one, at the moment that needs most."""
        step_memory = self.estimator.memory(step)
        if self.rollout_moments is None:
            return step_memory
        return self.rollout_moments.peak(step, step_memory)

    def micro_batching(self, recipe: Recipe, step: StepShape) -> batch.MicroBatching:
        return batch.choose_micro_batching(
            streaming.settings_of(recipe.train, step),
            step,
            sequences_per_step=self.sequences_per_step,
            measure=self.peak,
            seconds=self.seconds,
            together=partial(
                streaming.together,
                recipe,
                sequences=self.sequences_per_step,
                measure=self.peak,
                seconds=self.seconds,
            ),
        )


@final
@dataclass(frozen=True, kw_only=True)
class LayoutChooser:
    """Chooses how a step runs on `nodes` hosts with `gpus` devices each. `shape`: the step in micro-batches of one."""

    recipe: Recipe
    facts: Facts
    estimator: StepEstimator
    shape: StepShape
    gpus: int
    nodes: int

    def layout(self, sequences: int) -> StepLayout:
        """Of a step of so many sequences: on one device, or the best of those over several. Raises UserError."""
        moments = rollouts.RolloutMoments.of(self.recipe, self.facts, sequences)
        if self.gpus * self.nodes > 1:
            return self._on_several(sequences, moments)
        return self._on_one(sequences, moments)

    def _on_one(self, sequences: int, moments: rollouts.RolloutMoments | None) -> StepLayout:
        recipe = self.recipe
        estimator = self.estimator
        unsupported_layouts.refuse_context(recipe, self.facts.config, 1)

        # Micro-batches follow from what streams: a layer that streams leaves room for larger ones.
        workload = DeviceWorkload(
            estimator=estimator, sequences_per_step=sequences, rollout_moments=moments
        )
        stream, micro_batching, stream_plan = streaming.choose_stream(
            recipe,
            self.facts.config,
            estimator,
            self.shape,
            step_tokens=sequences * recipe.data.sequence_length,
            choose=partial(workload.micro_batching, recipe),
            seconds=workload.seconds,
        )

        # What follows from them: the time of a step and of its completions, and the other forms of a teacher.
        step = micro_batching.step
        seconds = workload.estimate(step)
        rollout = None
        if moments is not None:
            rollout = rollouts.plan_rollout(
                moments,
                estimator,
                step,
                estimator.memory(step),
                split=ONE_DEVICE,
                step_seconds=seconds,
            )
        return StepLayout(
            micro_batching=micro_batching,
            seconds=_with_sampling(seconds, rollout),
            parallel=None,
            rollout=rollout,
            stream=stream,
            stream_plan=stream_plan,
            teacher_forms=self._teacher_forms(step, workload.peak, workload.seconds, ONE_DEVICE),
        )

    def _on_several(self, sequences: int, moments: rollouts.RolloutMoments | None) -> StepLayout:
        recipe = self.recipe
        profile = self.facts.profile
        estimator = self.estimator
        streaming.refuse_stream(recipe, self.facts.config, profile, devices=self.gpus * self.nodes)

        # The best layout of those that devices, batch and recipe allow.
        step_of_device = replace(
            streaming.shape_on_replicas(recipe, self.shape, self.facts.machine),
            context=recipe.parallel.context,
            expert=recipe.parallel.expert,
        )
        workload = mesh.MeshWorkload.of(
            self.facts.machine,
            profile,
            step_of_device,
            estimator,
            sequences_per_step=sequences,
            gpus=self.gpus,
            nodes=self.nodes,
            assumed_network=recipe.parallel.network,
            rollout_moments=moments,
        )
        best, parallel = mesh.plan_mesh(workload, recipe)
        step = best.micro_batching.step
        split = best.split

        # What follows from it: the time of completions, what the hosts hold, and the other forms of a teacher.
        rollout = None
        if moments is not None:
            rollout = rollouts.plan_rollout(
                moments,
                estimator,
                step,
                workload.step_memory(split, step),
                split=split,
                step_seconds=best.seconds,
                fabric=workload.fabric,
            )
        stream, stream_plan = streaming.on_replicas(
            recipe,
            estimator,
            step,
            step_tokens=best.sequences * recipe.data.sequence_length,
            per_node=self.gpus,
        )
        # Ranks of a host have one copy; those of a pipeline's last stage one each.
        sharing = split.replicate * split.shard
        copies = min(self.gpus, sharing) if split.pipeline > 1 else 1
        teachers.refuse_small_host(step, estimator, copies=copies)
        return StepLayout(
            micro_batching=best.micro_batching,
            seconds=_with_sampling(best.seconds, rollout),
            parallel=parallel,
            rollout=rollout,
            stream=stream,
            stream_plan=stream_plan,
            teacher_forms=self._teacher_forms(
                step,
                workload.memory(split),
                partial(mesh.step_seconds, workload, split, best.sequences),
                split,
            ),
        )

    def _teacher_forms(
        self,
        step: StepShape,
        measure: batch.Measure,
        seconds: Callable[[StepShape], float | None],
        split: MeshSplit,
    ) -> tuple[teachers.TeacherForm, ...]:
        """Those of the teacher in this split, on GPUs: the memory of a CPU is the host's."""
        recipe = self.recipe
        if step.teacher is None or self.facts.profile.accelerator is None:
            return ()
        scored_apart = recipe.model_copy(
            update={"parallel": recipe.parallel.model_copy(update={"scoring_devices": 1})}
        )
        may_score_apart = not any(
            support_matrix.refusals(scored_apart, axis, self.facts.config)
            for axis in support_matrix.ALL_AXES
            if getattr(split, axis) > 1
        )
        has_link = self.estimator.host_link is not None
        return teachers.teacher_forms(
            step,
            measure=measure,
            seconds=lambda form: seconds(form) if has_link or not form.teacher_stream else None,
            devices=split.replicate * split.shard,
            host_devices=self.gpus + recipe.parallel.scoring_devices if may_score_apart else 1,
            states_tokens=most_loss_tokens(recipe),
        )


def _with_sampling(seconds: Estimate | None, rollout: RolloutPlan | None) -> Estimate | None:
    """The time of a step with that of the completions that it trains on."""
    if rollout is None:
        return seconds
    return speed.total(rollout.seconds) if rollout.seconds else None
