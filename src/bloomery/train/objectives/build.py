"""Training objectives: the head that the decoder runs, and the loss of its output as sums."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import MappingProxyType

import torch
from torch import Tensor, nn

from bloomery.core.device import sent
from bloomery.data.batch import Batch
from bloomery.facts.objectives import LossUnit, ObjectiveSpec
from bloomery.infer.forward import (
    eval_mode,
    forward_all,
    has_dropout,
    loss_positions_in,
    to_device,
)
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.decoder import Decoder
from bloomery.model.divergence import DivergenceMeasure
from bloomery.model.heads import (
    SCORE_OPERATORS,
    Head,
    LabelScores,
    ScoreOperators,
    ScoresAndValues,
    ScoreSettings,
    Values,
)
from bloomery.parallel.context import all_tokens
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.choices import correction_of, reference_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.objectives import (
    Distill,
    GroupRollouts,
    Grpo,
    Kto,
    ObjectiveSection,
    OnPolicyDistill,
    OrPo,
    Ppo,
    Preference,
    RewardedRollouts,
    Rloo,
    Rollouts,
    Sft,
    SimPo,
)
from bloomery.train.objectives.distillation import (
    TeacherPlan,
    divergence_head,
    load_teacher,
    teacher_pass,
)
from bloomery.train.objectives.losses import (
    LARGEST,
    LEAST,
    LossParts,
    LossTerm,
    PairScores,
    dft_loss,
    distillation_loss,
    dpo_loss,
    ipo_loss,
    kto_kl,
    kto_loss,
    next_token_loss,
    on_policy_loss,
    orpo_loss,
    pairs_of,
    present_pairs,
    reward_loss,
    sequence_sums,
    simpo_loss,
    sum_of_terms,
)
from bloomery.train.objectives.stored_scores import TOP_IDS, TOP_LOGPS, StoredDivergence
from bloomery.train.objectives.text_spans import (
    SpanScores,
    SpanTeacherPass,
    count_aligned_tokens,
    span_loss,
)
from bloomery.train.rl.policy_loss import PolicyLoss, SamplingCorrection
from bloomery.train.rl.ppo import PpoLoss
from bloomery.train.rl.rollout import SPANS, TEACHER_SPANS

Before = Callable[[Decoder, Sequence[Batch]], list[Batch]]


def count_loss_tokens(batch: Batch) -> float:
    return float(batch.loss_mask.sum())


def count_pairs(batch: Batch) -> float:
    return float(present_pairs(_sequences(batch)).sum())


@dataclass(frozen=True)
class Objective:
    """`head`: what the decoder computes for a micro-batch; `loss`: its loss as sums.

    `count`: what a step divides by, known before the first backward; equals the count of `loss`. `before` completes
    the micro-batches of a step first, all `together` or each on its own. Both take batches on the host. `loss_unit`:
    what the loss is counted per; per token it is in nats. `rows`: of numbers that the head gives, before [B, T].
    """

    head: Callable[[Batch], Head]
    loss: Callable[[Tensor, Batch], LossParts]
    count: Callable[[Batch], float] = count_loss_tokens
    before: Before | None = None
    together: bool = False
    loss_unit: LossUnit = "token"
    rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Scoring:
    """The head of per-token objectives; logits exist for at most `chunk` positions at once.

    The head adds the output layer's gradient to its `.grad` itself. With `entropy` it gives [2, B, T], and with a
    `value_head`, too, [3, B, T].
    """

    settings: ScoreSettings
    value_head: nn.Linear | None = None

    def __call__(self, batch: Batch) -> LabelScores | ScoresAndValues:
        scores = self.label_scores(batch)
        return scores if self.value_head is None else ScoresAndValues(scores, self.value_head)

    def label_scores(self, batch: Batch) -> LabelScores:
        settings = replace(self.settings, into_grad=True)
        return LabelScores(batch.labels, batch.loss_mask, settings, loss_positions_in(batch))


def batch_label_scores(
    model: Decoder, batch: Batch, settings: ScoreSettings, *, precision: str
) -> Tensor:
    """float32 [B, T]: the log-probability of each loss token, 0 elsewhere."""
    (scores_BT,) = all_label_scores(model, [batch], settings, precision=precision)
    return scores_BT


def all_label_scores(
    model: Decoder, batches: Sequence[Batch], settings: ScoreSettings, *, precision: str
) -> list[Tensor]:
    """`batch_label_scores` of each; every layer computes all of them before the next one."""
    heads = [
        LabelScores(batch.labels, batch.loss_mask, settings, loss_positions_in(batch))
        for batch in batches
    ]
    outputs = forward_all(model, batches, heads, precision=precision)
    # Stages of a pipeline without the head have no scores, and nobody reads theirs.
    return [
        output.head if model.ends_here else torch.zeros_like(batch.loss_mask)
        for output, batch in zip(outputs, batches, strict=True)
    ]


def in_groups(batches: Sequence[Batch], size: int, device: torch.device) -> Iterator[list[Batch]]:
    """The batches on the device, at most `size` at once."""
    for start in range(0, len(batches), size):
        yield [to_device(batch, device) for batch in batches[start : start + size]]


@contextmanager
def as_reference(model: Decoder, copy: Decoder | None) -> Iterator[Decoder]:
    """Inside the block, in evaluation mode: the frozen copy of the start, else `model` without its adapter."""
    if copy is not None:
        with eval_mode(copy):
            yield copy
        return
    with eval_mode(model), adapters_disabled(model):
        yield model


@dataclass(frozen=True)
class BaseScores:
    """Completes batches with reference log-probabilities: of `copy`, or of the base model, without its adapter.

    `together`: batches that share each load of streamed weights.
    """

    settings: ScoreSettings
    precision: str
    copy: Decoder | None = None
    together: int = 1

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        device = model.device
        with as_reference(model, self.copy) as reference:
            scores = [
                scores_BT
                for group in in_groups(batches, self.together, device)
                for scores_BT in all_label_scores(
                    reference, group, self.settings, precision=self.precision
                )
            ]
        return [
            batch.with_extras(reference=scores_BT)
            for batch, scores_BT in zip(batches, scores, strict=True)
        ]


@dataclass(frozen=True)
class ObjectiveInputs:
    """What objectives are built from. `base_scores`: None where a file has the reference log-probabilities.

    `load_teacher`: of a distillation alone. `together`: micro-batches that share each load of streamed weights.
    `aligns_texts`: the teacher has another tokenizer.
    """

    objective: ObjectiveSection
    precision: str
    scoring: Scoring
    base_scores: BaseScores | None
    mesh: Mesh
    load_teacher: Callable[[], Decoder]
    together: int = 1
    aligns_texts: bool = False


def build_objective(
    plan: RunPlan,
    load_teacher: Callable[[TeacherPlan], Decoder] = load_teacher,
    mesh: Mesh = SINGLE_RANK,
    operators: ScoreOperators = SCORE_OPERATORS,
    value_head: nn.Linear | None = None,
    reference: Decoder | None = None,
) -> Objective:
    """The plan's objective. `load_teacher`: of the model to distill. `value_head`: of the model that trains.

    `reference`: the frozen copy of its start, where it has one.
    """
    score_settings = ScoreSettings(plan.model.score_chunk, operators=operators)
    together = plan.train.stream_micro_batches
    scores_in_steps = reference_of(plan.objective, plan.adapter, plan.vision.train).value in (
        "adapters",
        "copy",
    )

    def teacher() -> Decoder:
        return load_teacher(TeacherPlan.of(plan))

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
        teacher,
        together,
        plan.aligns_texts,
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
        full_batch = full_batch_of(batch)
        scored_later = {
            name: mesh.all_gather_tokens(tensor) if tensor.ndim else tensor
            for name, tensor in batch.extras.items()
            if name not in full_batch.extras
        }
        parts = objective.loss(all_tokens(output, mesh), full_batch.with_extras(**scored_later))
        return LossParts(
            parts.total / mesh.context,
            parts.count / mesh.context,
            {
                name: sums if name.endswith((LARGEST, LEAST)) else sums / mesh.context
                for name, sums in parts.metrics.items()
            },
            parts.loads,
        )

    return replace(objective, loss=loss)


def full_batch_of(batch: Batch) -> Batch:
    assert batch.full_batch is not None, "a source keeps it where texts have one loss"
    return batch.full_batch


# Likelihood


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


# Pairs


def preference(inputs: ObjectiveInputs) -> Objective:
    """DPO and IPO, against a reference model."""
    settings = inputs.objective
    assert isinstance(settings, Preference)

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        pairs = _pairs(scores_BT, batch)
        reference = _reference_pairs(scores_BT, batch)
        if settings.kind == "ipo":
            return ipo_loss(pairs, reference, beta=settings.beta)
        return dpo_loss(
            pairs, reference, beta=settings.beta, label_smoothing=settings.label_smoothing
        )

    return Objective(
        head=inputs.scoring,
        loss=loss,
        count=count_pairs,
        before=inputs.base_scores,
        loss_unit="pair",
    )


def simple_preference(inputs: ObjectiveInputs) -> Objective:
    """SimPO and ORPO, which have no reference model."""
    settings = inputs.objective
    assert isinstance(settings, SimPo | OrPo)

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        pairs = _pairs(scores_BT, batch)
        if isinstance(settings, SimPo):
            return simpo_loss(pairs, beta=settings.beta, gamma=settings.gamma)
        return orpo_loss(pairs, beta=settings.beta)

    return Objective(head=inputs.scoring, loss=loss, count=count_pairs, loss_unit="pair")


def reward() -> Objective:
    """A reward model: the last token's value, higher for the chosen response."""
    return Objective(
        head=lambda _batch: Values(),
        loss=lambda values_BT, batch: reward_loss(values_BT, _sequences(batch)),
        count=count_pairs,
        loss_unit="pair",
    )


# KTO


def kto(inputs: ObjectiveInputs) -> Objective:
    """KTO. Its KL term is estimated over the whole step of all ranks, without dropout.

    A single micro-batch of one rank without dropout uses its own forward; else each has one more forward first.
    """
    settings = inputs.objective
    assert isinstance(settings, Kto)
    scoring = inputs.scoring
    precision = inputs.precision
    mesh = inputs.mesh

    def kl_sums(scores_BT: Tensor, batch: Batch) -> Tensor:
        pairs = _pairs(scores_BT, batch)
        reference = _reference_pairs(scores_BT, batch)
        return kto_kl(pairs.rejected, reference.rejected, pairs.present_P)

    def mismatched_head(host_batch: Batch, batch: Batch) -> LabelScores:
        """Scores sequences 2i + 1 alone: prompts with the response of another prompt. `batch`: on the device."""
        loss_mask_BT = host_batch.loss_mask * (_sequences(host_batch) % 2 == 1)
        loss_positions = loss_mask_BT.flatten().nonzero().squeeze(1)
        device = batch.labels.device
        return LabelScores(
            batch.labels,
            sent(loss_mask_BT, device),
            scoring.settings,
            sent(loss_positions, device),
        )

    def before(model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        if inputs.base_scores is not None:
            batches = inputs.base_scores(model, batches)
        # The stages of a pipeline agree: an adapter's dropout may be on some of them alone.
        if len(batches) == 1 and mesh.data_world == 1 and not mesh.any_rank(has_dropout(model)):
            return list(batches)
        device = model.device
        with eval_mode(model):
            sums = list[Tensor]()
            for group in in_groups(batches, inputs.together, device):
                host_group = batches[len(sums) : len(sums) + len(group)]
                heads = list(map(mismatched_head, host_group, group))
                outputs = forward_all(model, group, heads, precision=precision)
                for output, batch in zip(outputs, group, strict=True):
                    if mesh.last_stage:
                        sums.append(kl_sums(output.head, batch))
                    else:
                        sums.append(torch.zeros(2, device=device))
        baseline = _mean_at_least_0(mesh.all_reduce(sum(sums[1:], start=sums[0])))
        return [batch.with_extras(baseline=baseline) for batch in batches]

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        baseline = batch.extras.get("baseline")
        if baseline is None:
            baseline = _mean_at_least_0(kl_sums(scores_BT, batch))
        labels_S = sequence_sums(batch.extras["kto_labels"], _sequences(batch))
        desirable_P = labels_S.view(-1, 2)[:, 0] > 0
        return kto_loss(
            _pairs(scores_BT, batch),
            _reference_pairs(scores_BT, batch),
            desirable_P,
            baseline.to(scores_BT.dtype),
            beta=settings.beta,
            weights=(settings.desirable_weight, settings.undesirable_weight),
        )

    return Objective(
        head=scoring,
        loss=loss,
        count=count_pairs,
        before=before,
        together=True,
        loss_unit="answer",
    )


def _mean_at_least_0(kl_sums: Tensor) -> Tensor:
    """The mean, clamped: a KL divergence is never negative, its estimate may be."""
    return (kl_sums[0] / kl_sums[1].clamp(min=1)).clamp(min=0)


# Reinforcement learning


@dataclass(frozen=True)
class TermScales:
    """Completes the micro-batches of a step with the scale of each further term of its loss, `scale/NAME` in extras.

    A step divides all that it sums by one number, that of the first term, `count`. The scale is the term's weight times
    that number over the term's own, of all ranks: each term is then divided by what it is summed over. `terms`: the
    weight and the number of each, by name.
    """

    count: Callable[[Batch], float]
    terms: Mapping[str, tuple[float, Callable[[Batch], float]]]
    mesh: Mesh

    def __call__(self, model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        del model
        counts = (self.count, *(count for _, count in self.terms.values()))
        step_count, *term_counts = self.mesh.all_reduce_sum(
            *(sum(map(count, batches)) for count in counts)
        )
        scales = {
            f"scale/{name}": torch.tensor(weight * max(1.0, step_count) / max(1.0, term_count))
            for (name, (weight, _)), term_count in zip(self.terms.items(), term_counts, strict=True)
        }
        return [batch.with_extras(**scales) for batch in batches]


def policy(inputs: ObjectiveInputs) -> Objective:
    """GRPO and RLOO, on completions that the model sampled.

    The divergence from a teacher, and the cross-entropy of the better completions, may be further terms of the loss.
    """
    settings = inputs.objective
    assert isinstance(settings, Grpo | Rloo)
    loss_of = policy_loss_of(settings)
    divergence_of = _taught_loss(settings, inputs)
    mesh = inputs.mesh

    def count(batch: Batch) -> float:
        """A completion may be on several ranks, which share sequences: each counts its share of all."""
        return loss_of.count(batch if mesh.context == 1 else full_batch_of(batch)) / mesh.context

    head: Callable[[Batch], Head] = policy_scoring(settings, inputs.scoring)
    before_teacher: Before | None = None
    further_terms: dict[str, tuple[float, Callable[[Batch], float]]] = {}
    if settings.teacher is not None:
        teacher, before_teacher = teacher_of(inputs)
        head = on_policy_head(settings, teacher, inputs.scoring, spans=inputs.aligns_texts)
        further_terms["teacher"] = (settings.teacher_kl_coef, _count_taught(inputs))
    if settings.ce_coef:
        further_terms["ce"] = (settings.ce_coef, lambda batch: float(better_tokens(batch).sum()))

    def loss(results: Tensor, batch: Batch) -> LossParts:
        # Rows of the head: log-probabilities first, entropies last, a teacher's between them.
        scores_BT = results[0]
        rl = loss_of(scores_BT, results[-1], batch)
        if not further_terms:
            return rl
        terms = [LossTerm("rl", rl, 1.0)]
        if "teacher" in further_terms:
            divergence = divergence_of(results[:4], batch)
            terms.append(LossTerm("teacher", divergence, batch.extras["scale/teacher"]))
        if "ce" in further_terms:
            cross_entropy = next_token_loss(scores_BT, better_tokens(batch))
            terms.append(LossTerm("ce", cross_entropy, batch.extras["scale/ce"]))
        return sum_of_terms(terms, rl.count)

    reference_scores = None
    if loss_of.beta:
        assert inputs.base_scores is not None, "the plan refuses a divergence without its reference"
        score_settings = replace(inputs.base_scores.settings, temperature=settings.temperature)
        reference_scores = replace(inputs.base_scores, settings=score_settings)
    term_scales = None
    if further_terms:
        term_scales = TermScales(count, further_terms, mesh)
    return Objective(
        head=head,
        loss=loss,
        count=count,
        before=one_after_the_other(reference_scores, before_teacher, term_scales),
        loss_unit="completion",
        rows=(2,),  # no teacher judges over stages
    )


def better_tokens(batch: Batch) -> Tensor:
    """float32 [B, T]: 1 at the loss tokens of completions that were better than their group."""
    return batch.loss_mask * (batch.extras["advantages"] > 0)


def one_after_the_other(*all_before: Before | None) -> Before | None:
    """One that does what each of these does, in their order; None for none."""
    present = [before for before in all_before if before is not None]
    if len(present) < 2:
        return present[0] if present else None

    def together(model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        completed = list(batches)
        for before in present:
            completed = before(model, completed)
        return completed

    return together


def proximal_policy(inputs: ObjectiveInputs) -> Objective:
    """PPO, on completions that the model sampled, with a value head. Their rewards hold the KL divergence."""
    settings = inputs.objective
    assert isinstance(settings, Ppo)
    loss_of = PpoLoss(
        settings.cliprange, settings.cliprange_value, settings.vf_coef, settings.entropy_coef
    )

    def loss(results_3BT: Tensor, batch: Batch) -> LossParts:
        scores_BT, entropies_BT, values_BT = results_3BT
        return loss_of(scores_BT, entropies_BT, values_BT, batch)

    return Objective(
        head=policy_scoring(settings, inputs.scoring),
        loss=loss,
        loss_unit="completion",
        rows=(3,),
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


def policy_loss_of(settings: Grpo | Rloo) -> PolicyLoss:
    epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    if isinstance(settings, Rloo):
        return PolicyLoss(
            type="rloo",
            epsilon=settings.epsilon,
            epsilon_high=epsilon_high,
            entropy_coef=settings.entropy_coef,
        )
    correction = None
    if correction_of(settings).value:
        correction = SamplingCorrection(
            settings.importance_sampling_mode, settings.importance_sampling_clip_max
        )
    return PolicyLoss(
        type=settings.loss_type,
        level=settings.importance_sampling_level,
        epsilon=settings.epsilon,
        epsilon_high=epsilon_high,
        beta=settings.beta,
        entropy_coef=settings.entropy_coef,
        max_completion_length=settings.max_completion_length,
        correction=correction,
    )


# Distillation


def distillation(settings: Distill, teacher: Decoder, *, chunk: int) -> Objective:
    """Knowledge distillation with cross-entropy."""
    measure = DivergenceMeasure("forward_kl", settings.temperature)
    return Objective(
        head=lambda batch: divergence_head(batch, teacher, measure, chunk=chunk),
        loss=lambda output_4BT, batch: distillation_loss(
            output_4BT, batch.loss_mask, kd_ratio=settings.kd_ratio, temperature=measure.temperature
        ),
        loss_unit="label",
    )


def stored_distillation(settings: Distill, *, chunk: int) -> Objective:
    """As `distillation`, from the scores of a file."""
    return Objective(
        head=lambda batch: StoredDivergence(batch, chunk),
        loss=lambda output_2BT, batch: distillation_loss(
            output_2BT, batch.loss_mask, kd_ratio=settings.kd_ratio, temperature=1.0
        ),
        loss_unit="label",
    )


def distill(inputs: ObjectiveInputs) -> Objective:
    settings = inputs.objective
    assert isinstance(settings, Distill)
    if settings.teacher_scores is not None:
        return stored_distillation(settings, chunk=inputs.scoring.settings.chunk)
    teacher, before = teacher_of(inputs)
    assert teacher is not None, "the labels are a dataset's: the model has nothing to tell itself"
    objective = distillation(settings, teacher, chunk=inputs.scoring.settings.chunk)
    return replace(objective, before=before)


def on_policy_distill(inputs: ObjectiveInputs) -> Objective:
    """The teacher scores completions that the model sampled, at the temperature at which it did."""
    settings = inputs.objective
    assert isinstance(settings, OnPolicyDistill)
    teacher, before = teacher_of(inputs)
    return Objective(
        head=on_policy_head(settings, teacher, inputs.scoring, spans=inputs.aligns_texts),
        loss=_taught_loss(settings, inputs),
        count=_count_taught(inputs),
        before=before,
        loss_unit="label",
    )


def _count_taught(inputs: ObjectiveInputs) -> Callable[[Batch], float]:
    """How many tokens of a micro-batch a teacher of completions judges."""
    return count_aligned_tokens if inputs.aligns_texts else count_loss_tokens


def _taught_loss(
    settings: OnPolicyDistill | GroupRollouts, inputs: ObjectiveInputs
) -> Callable[[Tensor, Batch], LossParts]:
    """The divergence from the teacher, of the output of `on_policy_head`."""
    if inputs.aligns_texts:
        return lambda output_4BT, batch: span_loss(output_4BT, batch.loss_mask)
    return lambda output_4BT, batch: on_policy_loss(
        output_4BT, batch.loss_mask, sampled=settings.estimator == "sampled"
    )


def teacher_of(inputs: ObjectiveInputs) -> tuple[Decoder | None, Before | None]:
    """The teacher, None where the model is its own; and its pass before a step, where it has one."""
    teacher = None if inputs.objective.own_teacher is not None else inputs.load_teacher()
    before = before_of_teacher(
        inputs.objective,
        teacher,
        inputs.scoring.settings,
        precision=inputs.precision,
        together=inputs.together,
        spans=inputs.aligns_texts,
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
) -> Before | None:
    """The teacher's pass before a step, where it has one. `spans`: it has another tokenizer."""
    if not spans:
        return teacher_pass(objective, teacher, precision=precision, together=together)
    assert isinstance(objective, OnPolicyDistill | GroupRollouts) and teacher is not None
    plain = ScoreSettings(
        settings.chunk, operators=settings.operators, temperature=objective.temperature
    )
    streams = teacher.weight_stream is not None
    return SpanTeacherPass(teacher, plain, precision, together=None if streams else 1)


def on_policy_head(
    settings: OnPolicyDistill | GroupRollouts,
    teacher: Decoder | None,
    scoring: Scoring,
    *,
    spans: bool = False,
) -> Callable[[Batch], Head]:
    """The head of a micro-batch of completions, with entropies next to rewards. `teacher`: None where the model is its
    own. `spans`: it has another tokenizer.
    """
    has_rewards = isinstance(settings, GroupRollouts)
    if spans:
        of_policy = policy_scoring(settings, scoring)
        scores = replace(of_policy, settings=replace(of_policy.settings, entropy=has_rewards))
        return lambda batch: SpanScores(scores.label_scores(batch), batch)
    measure = DivergenceMeasure(settings.divergence, settings.temperature, settings.jsd_beta)
    return lambda batch: divergence_head(
        batch,
        teacher,
        measure,
        chunk=scoring.settings.chunk,
        at_temperature=True,
        entropy=has_rewards,
        entropy_gradient=isinstance(settings, GroupRollouts) and settings.entropy_coef > 0,
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


def _sequences(batch: Batch) -> Tensor:
    assert batch.sequences is not None, "batches of pairs number their sequences"
    return batch.sequences


def _pairs(scores_BT: Tensor, batch: Batch) -> PairScores:
    return pairs_of(scores_BT, batch.loss_mask, _sequences(batch))


def _reference_pairs(scores_BT: Tensor, batch: Batch) -> PairScores:
    return _pairs(batch.extras["reference"].to(scores_BT.dtype), batch)


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
