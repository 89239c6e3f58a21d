"""Objectives of reinforcement learning, on completions that the model sampled: GRPO, RLOO and PPO."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Head
from bloomery.parallel.mesh import Mesh
from bloomery.plan.choices import correction_of
from bloomery.recipe.objectives import Grpo, Ppo, Rloo
from bloomery.train.objectives.distillation import (
    count_taught,
    on_policy_head,
    policy_scoring,
    taught_loss,
    teacher_of,
)
from bloomery.train.objectives.losses import LossParts, LossTerm, next_token_loss, sum_of_terms
from bloomery.train.objectives.objective import (
    Before,
    Objective,
    ObjectiveInputs,
    one_after_the_other,
    own_share,
)
from bloomery.train.rl.policy_loss import PolicyLoss, SamplingCorrection
from bloomery.train.rl.ppo import PpoLoss


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
    divergence_of = taught_loss(settings, inputs)
    mesh = inputs.mesh

    head: Callable[[Batch], Head] = policy_scoring(settings, inputs.scoring)
    before_teacher: Before | None = None
    further_terms: dict[str, tuple[float, Callable[[Batch], float]]] = {}
    if settings.teacher is not None:
        teacher, before_teacher = teacher_of(inputs)
        head = on_policy_head(
            settings, teacher, inputs.scoring, spans=inputs.aligns_texts, mesh=mesh
        )
        further_terms["teacher"] = (settings.teacher_kl_coef, count_taught(inputs))
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
        term_scales = TermScales(own_share(loss_of.count, mesh), further_terms, mesh)
    return Objective(
        head=head,
        loss=loss,
        count=loss_of.count,
        before=one_after_the_other(reference_scores, before_teacher, term_scales),
        loss_unit="completion",
        rows=(2,) if settings.teacher is None else (5,),
    )


def better_tokens(batch: Batch) -> Tensor:
    """float32 [B, T]: 1 at the loss tokens of completions that were better than their group."""
    return batch.loss_mask * (batch.extras["advantages"] > 0)


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
