"""Training objectives: the head that the decoder runs, and the loss of its output as sums.

Log-probabilities of the reference model: precomputed before the first step, or by the base without its adapter.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.data.loader import Loader
from bloomery.data.reference_scores import ReferenceWriter
from bloomery.data.shards import SplitName
from bloomery.data.tokenizer.tokenizer import load_tokenizer
from bloomery.hub import local_model
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.attention.support import supports
from bloomery.model.config import ModelConfig
from bloomery.model.decoder import Decoder
from bloomery.model.heads import Divergence, Head, LabelScores, Teacher, Values
from bloomery.model.io.weights import load_decoder
from bloomery.model.limits import refuse_teacher_length, refuse_teacher_tokenizer
from bloomery.model.presets import read_config
from bloomery.monitor.events import Emit, Phase
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.choices import reference_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Distill, Kto, OrPo, Preference, Sft, SimPo
from bloomery.train.forward import eval_mode, forward, has_dropout, matmul_dtype, to_device
from bloomery.train.losses import (
    LossParts,
    PairScores,
    dft_loss,
    dpo_loss,
    ipo_loss,
    kto_kl,
    kto_loss,
    mean_of,
    next_token_loss,
    orpo_loss,
    pairs_of,
    reward_loss,
    sequence_sums,
    simpo_loss,
    there_pairs,
)

REPORT_SECONDS = 1.0  # seconds


class Stopped(Exception):
    """The run was stopped before the first step or during an evaluation."""


@dataclass(frozen=True)
class ReferenceProgress:
    """Emits how many sequences of all splits are done. Raises Stopped when the run is stopped."""

    emit: Emit
    stop: Callable[[], bool]
    before: int  # sequences of the splits before this one
    total: int

    def __call__(self, sequences: int) -> None:
        self.emit(Phase(name="reference", done=self.before + sequences, total=self.total))
        if self.stop():
            raise Stopped


def reference_file(run_dir: Path, split: SplitName) -> Path:
    """In the run folder: it belongs to the run's plan, shards and weights."""
    return run_dir / f"reference-{split}.bin"


def precompute(
    model: Decoder,
    loader: Loader,
    path: Path,
    *,
    batch_size: int,
    score_chunk: int,
    precision: str,
    run: str,
    progress: ReferenceProgress,
    mesh: Mesh = SINGLE_RANK,
) -> None:
    """Write the log-probability of every loss token of the split; resumes a killed computation. Raises Stopped.

    `model` must be as before the first step. Ranks share out the sequences; the first one writes.
    """
    device = next(model.parameters()).device
    last = 0.0
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        writer = (
            stack.enter_context(ReferenceWriter(path, loader.tokens, run))
            if mesh.first_rank
            else None
        )
        for number, (batch, stored) in enumerate(loader.stored_batches(batch_size)):
            if mesh.broadcast_bool(time.monotonic() - last > REPORT_SECONDS):
                last = time.monotonic()
                progress(number * batch_size * mesh.data_world)
            places = [each.numpy() for each in mesh.all_gather(stored)]
            if mesh.broadcast_bool(writer is not None and all(map(writer.has, places))):
                continue
            scores_BT = scores_of(
                model, to_device(batch, device), score_chunk=score_chunk, precision=precision
            )
            scored = mesh.all_gather(scores_BT.cpu())
            if writer is not None:
                for place, scores in zip(places, scored, strict=True):
                    writer.add(place, scores.numpy())
    mesh.barrier()
    progress(loader.stored_sequences)


def scores_of(model: Decoder, batch: Batch, *, score_chunk: int, precision: str) -> Tensor:
    """float32 [B, T]: the log-probability of each loss token, 0 elsewhere."""
    head = LabelScores(batch.labels, batch.loss_mask, score_chunk)
    return forward(model, batch, head, precision=precision).head


def without_adapters(
    model: Decoder, batches: Sequence[Batch], *, score_chunk: int, precision: str
) -> list[Batch]:
    """The same batches with the log-probabilities of the base model."""
    device = next(model.parameters()).device
    with eval_mode(model), adapters_disabled(model):
        return [
            batch.with_extras(
                reference=scores_of(
                    model, to_device(batch, device), score_chunk=score_chunk, precision=precision
                )
            )
            for batch in batches
        ]


def load_teacher(plan: RunPlan) -> Decoder:
    """The teacher on the run's device, in the dtype of its matmuls.

    Raises UserError when it cannot be read or its vocabulary differs from the dataset's.
    """
    assert isinstance(plan.objective, Distill)
    folder = local_model(plan.objective.teacher)
    refuse_teacher_tokenizer(
        load_tokenizer(folder), load_tokenizer(plan.data.prepared), where=str(folder)
    )
    attention = teacher_attention(read_config(folder), plan, where=str(folder))
    return _loaded(folder, matmul_dtype(plan.train.precision), plan.train.device, attention)


def teacher_attention(config: ModelConfig, plan: RunPlan, *, where: str) -> str:
    """The run's attention backend if it supports the teacher, else blockwise, which supports everything.

    Raises UserError when the sequences are longer than the teacher's learned positions.
    """
    length = plan.data.sequence_length
    refuse_teacher_length(config, length, where=where)
    windows = [
        window for window in map(config.window, range(config.num_layers)) if window is not None
    ]
    unfit = supports(
        plan.model.attention,
        device_type=plan.train.device,
        packed=plan.data.layout == "packed",
        window=any(window < length for window in windows),
        softcap=config.attention_softcap is not None,
        dropout=False,
    )
    return plan.model.attention if unfit is None else "blockwise"


@lru_cache(maxsize=1)  # a replanned run keeps its teacher: two might not fit in memory
def _loaded(folder: Path, dtype: torch.dtype, device: str, attention: str) -> Decoder:
    return load_decoder(folder, dtype=dtype, device=device, attention=attention).requires_grad_(
        False
    )


def divergence_of(batch: Batch, teacher: Decoder, asked: Distill, *, chunk: int) -> Divergence:
    """The head of one micro-batch; the teacher's forward runs inside it."""

    def hidden() -> Tensor:
        documents = None if teacher.model.backend == "sdpa" else batch.documents
        states: Tensor = teacher.model(batch.tokens, batch.positions, documents, None)
        return states

    taught = Teacher(hidden, teacher.lm_head, teacher.config.final_softcap)
    return Divergence(batch.labels, batch.loss_mask, chunk, asked.temperature, taught)


def distil_loss(output_2BT: Tensor, loss_mask_BT: Tensor, asked: Distill) -> LossParts:
    """share * temperature^2 * KL(teacher || model) + (1 - share) * cross-entropy, summed over the loss tokens.

    arXiv:1503.02531, section 2: the square keeps the gradient's size independent of the temperature.
    """
    scores_BT, divergence_BT = output_2BT
    mask_BT = loss_mask_BT != 0
    each_BT = (
        asked.kd_ratio * asked.temperature**2 * divergence_BT - (1 - asked.kd_ratio) * scores_BT
    )
    metrics = {"kl": mean_of(divergence_BT, mask_BT), "nats": mean_of(-scores_BT, mask_BT)}
    return LossParts((each_BT * loss_mask_BT).sum(), loss_mask_BT.sum(), metrics)


def with_text_structure(batch: Batch, plan: RunPlan) -> Batch:
    """A synthetic batch with what the objective needs: tokens, two texts per sequence, log-probabilities 0."""
    if not plan.objective.spec.numbers_texts:
        return batch
    if batch.sequences is None:
        rows, length = batch.tokens.shape
        later_T = (torch.arange(length) >= length // 2).long()
        halves = 2 * torch.arange(rows)[:, None] + later_T
        batch = replace(batch, sequences=halves)
        batch = batch.with_extras(kto_labels=torch.ones_like(batch.tokens))
    precomputed = reference_of(plan.objective, plan.adapter).value == "precomputed"
    if precomputed and "reference" not in batch.extras:
        batch = batch.with_extras(reference=torch.zeros_like(batch.loss_mask))
    return batch


def meta_teacher(plan: RunPlan) -> Decoder:
    """The teacher without weight values, in its dtype."""
    assert isinstance(plan.objective, Distill)
    folder = local_model(plan.objective.teacher)
    config = read_config(folder)
    attention = teacher_attention(config, plan, where=str(folder))
    usual = torch.get_default_dtype()
    torch.set_default_dtype(matmul_dtype(plan.train.precision))
    try:
        return Decoder(config, attention=attention).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


Before = Callable[[Decoder, Sequence[Batch]], list[Batch]]


def count_loss_tokens(batch: Batch) -> float:
    return float(batch.loss_mask.sum())


@dataclass(frozen=True)
class Objective:
    """`head`: what the decoder computes for a micro-batch; `loss`: its loss as sums.

    `count`: what a step divides by, known before the first backward; equals the count of `loss`. `before` completes
    the micro-batches of a step first, all `together` or each on its own. Both take batches on the host. `per`: the
    unit of the loss; per token it is in nats.
    """

    head: Callable[[Batch], Head]
    loss: Callable[[Tensor, Batch], LossParts]
    count: Callable[[Batch], float] = count_loss_tokens
    before: Before | None = None
    together: bool = False
    per: Literal["token", "label", "pair", "answer"] = "token"


@dataclass(frozen=True)
class Scoring:
    """The head of per-token objectives; logits exist for at most `chunk` positions at once.

    The head adds the output layer's gradient to its `.grad` itself.
    """

    chunk: int
    compiled: bool = False
    native: bool = False

    def __call__(self, batch: Batch) -> LabelScores:
        return LabelScores(
            batch.labels,
            batch.loss_mask,
            self.chunk,
            self.compiled,
            into_grad=True,
            native=self.native,
        )


def build_objective(
    plan: RunPlan, teacher: Callable[[RunPlan], Decoder] = load_teacher, mesh: Mesh = SINGLE_RANK
) -> Objective:
    """The plan's objective. `teacher` loads the model to distill."""
    scoring = Scoring(
        plan.model.score_chunk, plan.train.compile, native=plan.model.scores == "compiled"
    )
    asked = plan.objective
    if isinstance(asked, Sft) and asked.loss == "dft":
        return Objective(
            head=scoring, loss=lambda scores_BT, batch: dft_loss(scores_BT, batch.loss_mask)
        )
    if asked.kind in ("pretrain", "sft"):
        return likelihood(scoring)
    disabled = reference_of(asked, plan.adapter).value == "adapters"
    ask = partial(
        without_adapters, score_chunk=plan.model.score_chunk, precision=plan.train.precision
    )
    if isinstance(asked, Preference | SimPo | OrPo):
        return preference(asked, scoring, before=ask if disabled else None)
    if isinstance(asked, Kto):
        return marked(
            asked, scoring, plan.train.precision, reference=ask if disabled else None, mesh=mesh
        )
    if asked.kind == "reward":
        return rewarding()
    if isinstance(asked, Distill):
        return distillation(asked, teacher(plan), chunk=plan.model.score_chunk)
    raise AssertionError(f"a plan of objective.kind={asked.kind} is refused")


def pretraining(*, score_chunk: int, compiled: bool = False, native: bool = False) -> Objective:
    """Next-token loss over the loss tokens."""
    return likelihood(Scoring(score_chunk, compiled, native))


def likelihood(scoring: Scoring) -> Objective:
    """Cross-entropy per loss token; pretraining and supervised fine-tuning differ in the loss mask alone."""
    return Objective(
        head=scoring, loss=lambda scores_BT, batch: next_token_loss(scores_BT, batch.loss_mask)
    )


def preference(
    asked: Preference | SimPo | OrPo, scoring: Scoring, *, before: Before | None = None
) -> Objective:
    """DPO, IPO, SimPO and ORPO. `before`: computes the reference log-probabilities where no file has them."""

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        pairs = _pairs(scores_BT, batch)
        if isinstance(asked, SimPo):
            return simpo_loss(pairs, beta=asked.beta, gamma=asked.gamma)
        if isinstance(asked, OrPo):
            return orpo_loss(pairs, beta=asked.beta)
        reference = _reference(scores_BT, batch)
        if asked.kind == "ipo":
            return ipo_loss(pairs, reference, beta=asked.beta)
        return dpo_loss(pairs, reference, beta=asked.beta, label_smoothing=asked.label_smoothing)

    return Objective(head=scoring, loss=loss, count=_count_pairs, before=before, per="pair")


def distillation(asked: Distill, teacher: Decoder, *, chunk: int) -> Objective:
    """Knowledge distillation with cross-entropy."""
    return Objective(
        head=lambda batch: divergence_of(batch, teacher, asked, chunk=chunk),
        loss=lambda output_2BT, batch: distil_loss(output_2BT, batch.loss_mask, asked),
        per="label",
    )


def rewarding() -> Objective:
    """A reward model: the last token's value, higher for the chosen response."""

    def loss(values_BT: Tensor, batch: Batch) -> LossParts:
        assert batch.sequences is not None, "pairs are numbered"
        return reward_loss(values_BT, batch.sequences)

    return Objective(head=lambda _batch: Values(), loss=loss, count=_count_pairs, per="pair")


def marked(
    asked: Kto,
    scoring: Scoring,
    precision: str,
    *,
    reference: Before | None = None,
    mesh: Mesh = SINGLE_RANK,
) -> Objective:
    """KTO. Its KL term is estimated over the whole step of all ranks, without dropout.

    A single micro-batch of one rank without dropout uses its own forward; else each has one more forward first.
    """

    def kl(scores_BT: Tensor, batch: Batch) -> Tensor:
        pairs = _pairs(scores_BT, batch)
        reference = _reference(scores_BT, batch)
        return kto_kl(pairs.rejected, reference.rejected, pairs.there_P)

    def mismatched(batch: Batch) -> LabelScores:  # scores sequences 2i + 1 only
        assert batch.sequences is not None
        return replace(
            scoring(batch),
            loss_mask_BT=batch.loss_mask * (batch.sequences % 2 == 1),
            into_grad=False,
        )

    def before(model: Decoder, batches: Sequence[Batch]) -> list[Batch]:
        batches = list(batches) if reference is None else reference(model, batches)
        if len(batches) == 1 and mesh.data_world == 1 and not has_dropout(model):
            return batches
        device = next(model.parameters()).device
        with eval_mode(model):
            there = (to_device(batch, device) for batch in batches)
            sums = [
                kl(forward(model, batch, mismatched(batch), precision=precision).head, batch)
                for batch in there
            ]
        baseline = _at_least_0(mesh.all_reduce(sum(sums[1:], start=sums[0])))
        return [batch.with_extras(baseline=baseline) for batch in batches]

    def loss(scores_BT: Tensor, batch: Batch) -> LossParts:
        assert batch.sequences is not None, "KTO batches have sequence numbers"
        baseline = batch.extras.get("baseline")
        if baseline is None:
            baseline = _at_least_0(kl(scores_BT, batch))
        labels_S = sequence_sums(batch.extras["kto_labels"], batch.sequences)
        desirable = labels_S.view(-1, 2)[:, 0] > 0
        pairs = _pairs(scores_BT, batch)
        reference = _reference(scores_BT, batch)
        weights = asked.desirable_weight, asked.undesirable_weight
        return kto_loss(
            pairs,
            reference,
            desirable,
            baseline.to(scores_BT.dtype),
            beta=asked.beta,
            weights=weights,
        )

    return Objective(
        head=scoring, loss=loss, count=_count_pairs, before=before, together=True, per="answer"
    )


def _at_least_0(kl: Tensor) -> Tensor:
    """The mean, clamped: a KL divergence is never negative, its estimate may be."""
    return (kl[0] / kl[1].clamp(min=1)).clamp(min=0)


def _reference(scores_BT: Tensor, batch: Batch) -> PairScores:
    return _pairs(batch.extras["reference"].to(scores_BT.dtype), batch)


def _pairs(scores_BT: Tensor, batch: Batch) -> PairScores:
    assert batch.sequences is not None, "pairs are numbered"
    return pairs_of(scores_BT, batch.loss_mask, batch.sequences)


def _count_pairs(batch: Batch) -> float:
    assert batch.sequences is not None, "pairs are numbered"
    return float(there_pairs(batch.sequences).sum())
