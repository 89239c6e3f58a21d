"""Log-probabilities of the reference model: precomputed before the first step, or by the base without its adapter."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from bloomery.data.loader import Batch, Loader, ReferenceWriter
from bloomery.data.shards import SplitName
from bloomery.model.adapters.lora import adapters_disabled
from bloomery.model.decoder import Decoder
from bloomery.model.heads import LabelScores
from bloomery.monitor.events import Emit, Phase
from bloomery.parallel.mesh import ALONE, Mesh
from bloomery.train.forward import eval_mode, forward, to_device

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
    model: Decoder, loader: Loader, path: Path, *, batch_size: int, score_chunk: int, precision: str, run: str,
    progress: ReferenceProgress, mesh: Mesh = ALONE,
) -> None:  # fmt: skip
    """Write the log-probability of every loss token of the split; resumes a killed computation. Raises Stopped.

    `model` must be as before the first step. Ranks share out the sequences; the first one writes.
    """
    device, last = next(model.parameters()).device, 0.0
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        writer = stack.enter_context(ReferenceWriter(path, loader.tokens, run)) if mesh.first else None
        for number, (batch, stored) in enumerate(loader.stored_batches(batch_size)):
            if mesh.number(time.monotonic() - last > REPORT_SECONDS):
                last = time.monotonic()
                progress(number * batch_size * mesh.world)
            places = [each.numpy() for each in mesh.gathered(stored)]
            if mesh.number(writer is not None and all(map(writer.has, places))):
                continue
            scores_BT = scores_of(model, to_device(batch, device), score_chunk=score_chunk, precision=precision)
            scored = mesh.gathered(scores_BT.cpu())
            if writer is not None:
                for place, scores in zip(places, scored, strict=True):
                    writer.add(place, scores.numpy())
    mesh.barrier()
    progress(loader.stored_sequences)


def scores_of(model: Decoder, batch: Batch, *, score_chunk: int, precision: str) -> Tensor:
    """float32 [B, T]: the log-probability of each loss token, 0 elsewhere."""
    head = LabelScores(batch.labels, batch.loss_mask, score_chunk)
    return forward(model, batch, head, precision=precision)


def without_adapters(model: Decoder, batches: Sequence[Batch], *, score_chunk: int, precision: str) -> list[Batch]:
    """The same batches with the log-probabilities of the base model."""
    device = next(model.parameters()).device
    with eval_mode(model), adapters_disabled(model):
        return [
            replace(
                batch,
                reference=scores_of(model, to_device(batch, device), score_chunk=score_chunk, precision=precision),
            )
            for batch in batches
        ]
