"""Scores of the model of the start: computed once before the first step, or by the base without its adapters."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bloomery.data.loading.loader import Batch, Loader
from bloomery.data.loading.reference_logprobs import ReferenceWriter
from bloomery.data.shards.format import SplitName
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores
from bloomery.monitor.events import Emit, Phase
from bloomery.train.forward import eval_mode, forward, to_device

REPORT_SECONDS = 1.0  # seconds


class Stopped(Exception):
    """The run was asked to stop where no step is taken: before the first, or while the model is evaluated."""


@dataclass(frozen=True)
class ReferenceProgress:
    """Says how many rows of all splits are done, and hears whether to go on."""

    emit: Emit
    stop: Callable[[], bool]
    before: int  # rows of the splits before this one
    total: int

    def __call__(self, sequences: int) -> None:
        self.emit(Phase(name="reference", done=self.before + sequences, total=self.total))
        if self.stop():
            raise Stopped


def reference_file(run_dir: Path, split: SplitName) -> Path:
    """Beside the run: the plan, the shards and the weights that it belongs to are the run's own."""
    return run_dir / f"reference-{split}.bin"


def precompute(
    model: Decoder, loader: Loader, path: Path, *, batch_size: int, score_chunk: int, precision: str, run: str,
    progress: ReferenceProgress,
) -> None:  # fmt: skip
    """Fills the file with the log-probability of every learned label of the split; what is there already stays.

    `model` is as it was before the first step. A killed computation goes on where it was. Raises Stopped.
    """
    device, last = next(model.parameters()).device, 0.0
    with ReferenceWriter(path, loader.tokens, run) as writer, eval_mode(model):
        for number, (batch, stored) in enumerate(loader.stored_batches(batch_size)):
            if time.monotonic() - last > REPORT_SECONDS:
                last = time.monotonic()
                progress(number * batch_size)
            if writer.has(stored.numpy()):
                continue
            scores_BT = scores_of(model, to_device(batch, device), score_chunk=score_chunk, precision=precision)
            writer.add(stored.numpy(), scores_BT.cpu().numpy())
    progress(loader.stored_sequences)


def scores_of(model: Decoder, batch: Batch, *, score_chunk: int, precision: str) -> Tensor:
    """float32 [B, T]: the log-probability of each learned label, 0 elsewhere."""
    head = LabelScores(batch.labels, batch.loss_mask, score_chunk)
    return forward(model, batch, head, precision=precision)


def without_adapters(model: Decoder, batches: Sequence[Batch], *, score_chunk: int, precision: str) -> list[Batch]:
    """The same batches with the scores of the base."""
    device = next(model.parameters()).device
    with eval_mode(model), adapters_disabled(model):
        return [
            replace(
                batch,
                reference=scores_of(model, to_device(batch, device), score_chunk=score_chunk, precision=precision),
            )
            for batch in batches
        ]
