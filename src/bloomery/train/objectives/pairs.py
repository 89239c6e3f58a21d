"""Objectives on pairs of texts: DPO, IPO, SimPO, ORPO, KTO and reward models."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bloomery.core.device import sent
from bloomery.data.batch import Batch
from bloomery.infer.forward import eval_mode, forward_all, has_dropout
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores, Values
from bloomery.recipe.objectives import Kto, OrPo, Preference, SimPo
from bloomery.train.objectives.losses import (
    LossParts,
    PairScores,
    dpo_loss,
    ipo_loss,
    kto_kl,
    kto_loss,
    orpo_loss,
    pairs_of,
    present_pairs,
    reward_loss,
    sequence_sums,
    simpo_loss,
)
from bloomery.train.objectives.objective import (
    Objective,
    ObjectiveInputs,
    in_groups,
    of_all_tokens,
)


def count_pairs(batch: Batch) -> float:
    return float(present_pairs(_sequences(batch)).sum())


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
        """The KL term as a sum and a count. Ranks that share sequences all have theirs: the mean is the same."""
        if mesh.context > 1:
            scores_BT, batch = of_all_tokens(scores_BT, batch, mesh)
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


def _sequences(batch: Batch) -> Tensor:
    assert batch.sequences is not None, "batches of pairs number their sequences"
    return batch.sequences


def _pairs(scores_BT: Tensor, batch: Batch) -> PairScores:
    return pairs_of(scores_BT, batch.loss_mask, _sequences(batch))


def _reference_pairs(scores_BT: Tensor, batch: Batch) -> PairScores:
    return _pairs(batch.extras["reference"].to(scores_BT.dtype), batch)


def _mean_at_least_0(kl_sums: Tensor) -> Tensor:
    """The mean, clamped: a KL divergence is never negative, its estimate may be."""
    return (kl_sums[0] / kl_sums[1].clamp(min=1)).clamp(min=0)
