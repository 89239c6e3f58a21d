"""Objectives of distillation: on the tokens of a dataset, and on completions that the model sampled."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.model.decoder import Decoder
from bloomery.model.divergence import DivergenceMeasure
from bloomery.model.heads import Head, ScoreSettings
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.recipe.objectives import (
    Distill,
    GroupRollouts,
    ObjectiveSection,
    OnPolicyDistill,
    RewardedRollouts,
    Rollouts,
)
from bloomery.train.objectives.losses import LossParts, distillation_loss, on_policy_loss
from bloomery.train.objectives.objective import (
    TEACHER_HIDDEN,
    Before,
    Objective,
    ObjectiveInputs,
    Scoring,
    count_loss_tokens,
)
from bloomery.train.objectives.stored_scores import StoredDivergence
from bloomery.train.objectives.teacher import (
    divergence_head,
    teacher_pass,
)
from bloomery.train.objectives.text_spans import (
    TEACHER_SPAN_LOGPS,
    SpanScores,
    SpanTeacherPass,
    count_aligned_tokens,
    span_loss,
)
from bloomery.train.scorers.client import ScoredBefore, ScoredTeacher, TeacherOutput


def distillation(
    settings: Distill, teacher: Decoder | TeacherOutput | None, *, chunk: int
) -> Objective:
    """Knowledge distillation with cross-entropy. `teacher`: None on a stage without the head."""
    measure = DivergenceMeasure("forward_kl", settings.temperature)
    return Objective(
        head=lambda batch: divergence_head(batch, teacher, measure, chunk=chunk),
        loss=lambda output_4BT, batch: distillation_loss(
            output_4BT, batch.loss_mask, kd_ratio=settings.kd_ratio, temperature=measure.temperature
        ),
        loss_unit="label",
        rows=(4,),
    )


def stored_distillation(settings: Distill, *, chunk: int) -> Objective:
    """As `distillation`, from the scores of a file."""
    return Objective(
        head=lambda batch: StoredDivergence(batch, chunk),
        loss=lambda output_2BT, batch: distillation_loss(
            output_2BT, batch.loss_mask, kd_ratio=settings.kd_ratio, temperature=1.0
        ),
        loss_unit="label",
        rows=(2,),
    )


def distill(inputs: ObjectiveInputs) -> Objective:
    settings = inputs.objective
    assert isinstance(settings, Distill)
    if settings.teacher_scores is not None:
        return stored_distillation(settings, chunk=inputs.scoring.settings.chunk)
    teacher, before = teacher_of(inputs)
    objective = distillation(settings, teacher, chunk=inputs.scoring.settings.chunk)
    return replace(objective, before=before)


def on_policy_distill(inputs: ObjectiveInputs) -> Objective:
    """The teacher scores completions that the model sampled, at the temperature at which it did."""
    settings = inputs.objective
    assert isinstance(settings, OnPolicyDistill)
    teacher, before = teacher_of(inputs)
    return Objective(
        head=on_policy_head(
            settings, teacher, inputs.scoring, spans=inputs.aligns_texts, mesh=inputs.mesh
        ),
        loss=taught_loss(settings, inputs),
        count=count_taught(inputs),
        before=before,
        loss_unit="label",
        rows=(4,),
    )


def count_taught(inputs: ObjectiveInputs) -> Callable[[Batch], float]:
    """How many tokens of a micro-batch a teacher of completions judges."""
    return count_aligned_tokens if inputs.aligns_texts else count_loss_tokens


def taught_loss(
    settings: OnPolicyDistill | GroupRollouts, inputs: ObjectiveInputs
) -> Callable[[Tensor, Batch], LossParts]:
    """The divergence from the teacher, of the output of `on_policy_head`."""
    if inputs.aligns_texts:
        return lambda output_4BT, batch: span_loss(output_4BT, batch.loss_mask)
    return lambda output_4BT, batch: on_policy_loss(
        output_4BT, batch.loss_mask, sampled=settings.estimator == "sampled"
    )


def teacher_of(inputs: ObjectiveInputs) -> tuple[Decoder | TeacherOutput | None, Before | None]:
    """The teacher, None where the model is its own and on stages without the head; and its pass before a step, where it
    has one. Of a teacher in scoring processes it is what `scored` gives.
    """
    if inputs.scored_teacher is not None:
        return scored(inputs.scored_teacher, spans=inputs.aligns_texts)
    teacher = None if inputs.objective.own_teacher is not None else inputs.load_teacher()
    before = before_of_teacher(
        inputs.objective,
        teacher,
        inputs.scoring.settings,
        precision=inputs.precision,
        together=inputs.together,
        spans=inputs.aligns_texts,
        mesh=inputs.mesh,
    )
    return teacher, before


def before_of_teacher(
    objective: ObjectiveSection,
    teacher: Decoder | None,
    settings: ScoreSettings,
    *,
    precision: str,
    together: int,
    spans: bool,
    mesh: Mesh,
) -> Before | None:
    """The teacher's pass before a step, where it has one. `spans`: it has another tokenizer."""
    if not spans:
        return teacher_pass(objective, teacher, precision=precision, together=together, mesh=mesh)
    if teacher is None:
        return None
    return span_teacher_pass(objective, teacher, settings, precision=precision, mesh=mesh)


def span_teacher_pass(
    objective: ObjectiveSection,
    teacher: Decoder,
    settings: ScoreSettings,
    *,
    precision: str,
    mesh: Mesh = SINGLE_RANK,
) -> SpanTeacherPass:
    """That of a teacher with another tokenizer."""
    assert isinstance(objective, OnPolicyDistill | GroupRollouts)
    plain = ScoreSettings(
        settings.chunk, operators=settings.operators, temperature=objective.temperature
    )
    streams = teacher.weight_stream is not None
    return SpanTeacherPass(teacher, plain, precision, together=None if streams else 1, mesh=mesh)


def scored(teacher: ScoredTeacher, *, spans: bool) -> tuple[TeacherOutput | None, ScoredBefore]:
    """What of a teacher in scoring processes is here, and its pass. `spans`: it has another tokenizer."""
    if spans:
        return None, ScoredBefore(teacher.scorers, TEACHER_SPAN_LOGPS)
    return teacher.load_output(), ScoredBefore(teacher.scorers, TEACHER_HIDDEN)


def on_policy_head(
    settings: OnPolicyDistill | GroupRollouts,
    teacher: Decoder | TeacherOutput | None,
    scoring: Scoring,
    *,
    spans: bool = False,
    mesh: Mesh = SINGLE_RANK,
) -> Callable[[Batch], Head]:
    """The head of a micro-batch of completions, with entropies next to rewards. `teacher`: None where the model is its
    own, and on stages without the head. `spans`: it has another tokenizer.
    """
    has_rewards = isinstance(settings, GroupRollouts)
    if spans:
        of_policy = policy_scoring(settings, scoring)
        scores = replace(of_policy, settings=replace(of_policy.settings, entropy=has_rewards))
        return lambda batch: SpanScores(scores.label_scores(batch), batch, mesh)
    measure = DivergenceMeasure(settings.divergence, settings.temperature, settings.jsd_beta)
    return lambda batch: divergence_head(
        batch,
        teacher,
        measure,
        chunk=scoring.settings.chunk,
        at_temperature=True,
        entropy=has_rewards,
        entropy_gradient=isinstance(settings, GroupRollouts) and settings.entropy_coef > 0,
        mesh=mesh,
    )


def policy_scoring(settings: Rollouts, scoring: Scoring) -> Scoring:
    """The head of both the loss and of scores before the first step of a rollout."""
    score_settings = replace(
        scoring.settings,
        temperature=settings.temperature,
        entropy=True,
        entropy_gradient=isinstance(settings, RewardedRollouts) and settings.entropy_coef > 0,
    )
    return replace(scoring, settings=score_settings)
