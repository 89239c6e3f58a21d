"""The models of a scoring process, and what they answer."""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from bloomery.core.child import LONGEST_REASON, Message
from bloomery.core.device import release_cached_memory, select_device
from bloomery.hub import local_model
from bloomery.infer.forward import with_places
from bloomery.infer.held_model import held_model
from bloomery.model.decoder import Decoder
from bloomery.model.heads import ScoreSettings
from bloomery.plan.types import RunPlan
from bloomery.recipe.rewards import ModelReward
from bloomery.train.evaluation.scoring import value_scores
from bloomery.train.kernels import build_kernels
from bloomery.train.objectives.distillation import span_teacher_pass
from bloomery.train.objectives.objective import Before
from bloomery.train.objectives.teacher import TeacherPass, TeacherPlan, load_teacher
from bloomery.train.process import out_of_memory, set_up_process
from bloomery.train.rl.reward_models import load_reward_model
from bloomery.train.scorers.messages import batch_of, packed_tensors, unpacked_tensors


@final
@dataclass(frozen=True)
class ScoringModels:
    """`teacher` and its pass; None for a plan with reward models alone. `reward_models`: by the name in the recipe."""

    teacher: Decoder | None
    before: Before | None
    reward_models: Mapping[str, Decoder]

    @classmethod
    def load(cls, plan_json: str, device_index: int) -> "ScoringModels":
        """Raises UserError where one cannot be read, or is none."""
        plan = RunPlan.model_validate_json(plan_json)
        select_device(plan.train.device, device_index)
        # The threads of a training rank, so that the numbers are those that it would compute.
        set_up_process(plan.train, memory_limit=plan.scoring_limit)
        build_kernels(plan.model)
        teacher = None
        before: Before | None = None
        if plan.objective.taught_by is not None:
            teacher = load_teacher(TeacherPlan.of(plan))
            before = TeacherPass(plan.train.precision, teacher)
            if plan.aligns_texts:
                settings = ScoreSettings(plan.model.score_chunk)
                before = span_teacher_pass(
                    plan.objective, teacher, settings, precision=plan.train.precision
                )
        reward_models = dict[str, Decoder]()
        for name in {
            reward.model: None for reward in plan.rewards if isinstance(reward, ModelReward)
        }:
            with held_model(local_model(name)) as files:
                reward_models[name] = load_reward_model(
                    files, name, plan.train.device, precision=plan.train.precision
                )
        return cls(teacher, before, reward_models)

    def description(self) -> Message:
        """How many tokens each reward model reads at most."""
        lengths = {name: model.config.max_positions for name, model in self.reward_models.items()}
        return {"reward_models": lengths}

    def attempt(self, request: Message) -> tuple[dict[str, Any], bytes]:
        """`answer`, or the message of an allocation that failed: the rank then tries smaller micro-batches."""
        try:
            return self.answer(request)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            reason = str(error)[:LONGEST_REASON]
        # Outside the handler: the traceback holds every tensor of the forward.
        gc.collect()
        release_cached_memory()
        return {"out_of_memory": reason}, b""

    def answer(self, request: Message) -> tuple[dict[str, Any], bytes]:
        """A message and its bytes."""
        if request["kind"] == "values":
            values = value_scores(
                self.reward_models[request["model"]],
                request["texts"],
                request["tokens_per_forward"],
            )
            return {"values": values.tolist()}, b""

        assert self.teacher is not None and self.before is not None
        batch = batch_of(unpacked_tensors(request["tensors"], request.get("content", b"")))
        if request["places"]:
            batch = with_places(batch)
        (completed,) = self.before(self.teacher, [batch])
        added = {
            name: tensor for name, tensor in completed.extras.items() if name not in batch.extras
        }
        header, content = packed_tensors(added)
        return {"tensors": header}, content
