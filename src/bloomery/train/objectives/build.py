"""Each kind of objective, built from a plan."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import MappingProxyType

import torch
from torch import Tensor, nn

from bloomery.data.batch import Batch
from bloomery.facts.objectives import ObjectiveSpec
from bloomery.model.decoder import Decoder
from bloomery.model.heads import SCORE_OPERATORS, ScoreOperators, ScoreSettings
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.choices import reference_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import Sft
from bloomery.train.objectives.distillation import distill, on_policy_distill
from bloomery.train.objectives.losses import LARGEST, LEAST, LossParts, dft_loss, next_token_loss
from bloomery.train.objectives.objective import (
    BaseScores,
    Objective,
    ObjectiveInputs,
    Scoring,
    of_all_tokens,
    own_share,
)
from bloomery.train.objectives.pairs import kto, preference, reward, simple_preference
from bloomery.train.objectives.policies import policy, proximal_policy
from bloomery.train.objectives.stored_scores import TOP_IDS, TOP_LOGPS
from bloomery.train.objectives.teacher import (
    TeacherPlan,
    load_teacher,
    teacher_of_rank,
)
from bloomery.train.rl.rollout import SPANS, TEACHER_SPANS
from bloomery.train.scorers.client import ScoredTeacher


def build_objective(
    plan: RunPlan,
    load_teacher: Callable[[TeacherPlan], Decoder] = load_teacher,
    mesh: Mesh = SINGLE_RANK,
    operators: ScoreOperators = SCORE_OPERATORS,
    value_head: nn.Linear | None = None,
    reference: Decoder | None = None,
    scored_teacher: ScoredTeacher | None = None,
) -> Objective:
    """The plan's objective. `load_teacher`: of the model to distill. `value_head`: of the model that trains.

    `reference`: the frozen copy of its start, where it has one. `scored_teacher`: one in scoring processes.
    """
    score_settings = ScoreSettings(plan.model.score_chunk, operators=operators)
    together = plan.train.stream_micro_batches
    scores_in_steps = reference_of(plan.objective, plan.adapter, plan.vision.train).value in (
        "adapters",
        "copy",
    )

    inputs = ObjectiveInputs(
        plan.objective,
        plan.train.precision,
        Scoring(
            replace(
                score_settings,
                compiled=plan.train.compile,
                native=plan.model.scores == "compiled",
            ),
            value_head,
        ),
        BaseScores(score_settings, plan.train.precision, copy=reference, together=together)
        if scores_in_steps
        else None,
        mesh,
        partial(teacher_of_rank, plan, mesh, load_teacher),
        together,
        plan.aligns_texts,
        scored_teacher,
    )
    objective = _builder_of(plan.objective.spec)(inputs)
    if mesh.context > 1 and plan.objective.spec.numbers_texts:
        return of_whole_texts(objective, mesh)
    return objective


def of_whole_texts(objective: Objective, mesh: Mesh) -> Objective:
    """The objective where ranks share sequences, whose texts have one loss: micro-batches have their `full_batch`.

    Each rank of a group computes the loss of all tokens, and counts its share of it.
    """

    def loss(output: Tensor, batch: Batch) -> LossParts:
        parts = objective.loss(*of_all_tokens(output, batch, mesh))
        return LossParts(
            parts.total / mesh.context,
            parts.count / mesh.context,
            {
                name: sums if name.endswith((LARGEST, LEAST)) else sums / mesh.context
                for name, sums in parts.metrics.items()
            },
            parts.loads,
        )

    return replace(objective, loss=loss, count=own_share(objective.count, mesh))


def pretraining(*, score_chunk: int, compiled: bool = False, native: bool = False) -> Objective:
    """Next-token loss over the loss tokens."""
    return likelihood(Scoring(ScoreSettings(score_chunk, compiled, native=native)))


def likelihood(scoring: Scoring) -> Objective:
    """Cross-entropy per loss token; pretraining and supervised fine-tuning differ in the loss mask alone."""
    return Objective(
        head=scoring, loss=lambda scores_BT, batch: next_token_loss(scores_BT, batch.loss_mask)
    )


def supervised(inputs: ObjectiveInputs) -> Objective:
    settings = inputs.objective
    assert isinstance(settings, Sft)
    if settings.loss != "dft":
        return likelihood(inputs.scoring)
    return Objective(
        head=inputs.scoring, loss=lambda scores_BT, batch: dft_loss(scores_BT, batch.loss_mask)
    )


BUILDERS: Mapping[str, Callable[[ObjectiveInputs], Objective]] = MappingProxyType(
    {
        "pretrain": lambda inputs: likelihood(inputs.scoring),
        "sft": supervised,
        "dpo": preference,
        "ipo": preference,
        "simpo": simple_preference,
        "orpo": simple_preference,
        "kto": kto,
        "reward": lambda _inputs: reward(),
        "distill": distill,
        "on_policy_distill": on_policy_distill,
        "grpo": policy,
        "rloo": policy,
        "ppo": proximal_policy,
    }
)


def _builder_of(spec: ObjectiveSpec) -> Callable[[ObjectiveInputs], Objective]:
    if not spec.builder:
        return BUILDERS[spec.kind]
    module, _, function = spec.builder.partition(":")
    builder: Callable[[ObjectiveInputs], Objective] = getattr(import_module(module), function)
    return builder


def with_text_structure(batch: Batch, plan: RunPlan) -> Batch:
    """A synthetic batch with what the objective needs: tokens, two texts per sequence, log-probabilities 0."""
    batch = _with_teacher(batch, plan)
    if not plan.objective.spec.numbers_texts:
        return batch
    if batch.sequences is None:
        rows, length = batch.tokens.shape
        is_second_T = (torch.arange(length) >= length // 2).long()
        halves_BT = 2 * torch.arange(rows)[:, None] + is_second_T
        batch = replace(batch, sequences=halves_BT)
        batch = batch.with_extras(kto_labels=torch.ones_like(batch.tokens))
    reference = reference_of(plan.objective, plan.adapter, plan.vision.train)
    if reference.value == "precomputed" and "reference" not in batch.extras:
        batch = batch.with_extras(reference=torch.zeros_like(batch.loss_mask))
    return batch


def _with_teacher(batch: Batch, plan: RunPlan) -> Batch:
    """A synthetic batch with what a teacher is that has written its scores, or that has another tokenizer."""
    if plan.objective.stored_scores is not None and TOP_IDS not in batch.extras:
        assert plan.dataset is not None and plan.dataset.teacher_scores is not None
        top = plan.dataset.teacher_scores.top
        places_BTK = torch.arange(top).expand(*batch.tokens.shape, top)
        batch = batch.with_extras(
            **{
                TOP_IDS: places_BTK.int(),
                TOP_LOGPS: torch.full(places_BTK.shape, -math.log(2.0 * top)),
            }
        )
    if plan.aligns_texts:
        # A teacher of another tokenizer reads the same shapes; each token is a span of its own.
        places_BT = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
        extras = {SPANS: places_BT, TEACHER_SPANS: places_BT}
        for name in ("tokens", "labels", "loss_mask", "positions", "documents"):
            extras[f"teacher_{name}"] = getattr(batch, name)
        batch = batch.with_extras(**extras)
    return batch
