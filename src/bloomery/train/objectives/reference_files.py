"""Log-probabilities of the reference model, computed before the first step, into files of the run folder."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from bloomery.data.loader import Loader
from bloomery.data.reference_scores import ReferenceWriter
from bloomery.data.shards import SplitName
from bloomery.infer.forward import eval_mode, to_device
from bloomery.model.decoder import Decoder
from bloomery.model.heads import ScoreSettings
from bloomery.monitor.events import Emit, Phase
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import DataPlan
from bloomery.train.batch_source import open_loader
from bloomery.train.failures import Stopped
from bloomery.train.objectives.objective import batch_label_scores
from bloomery.train.state import TrainState, restore

REPORT_SECONDS = 1.0


def reference_file(run_dir: Path, split: SplitName) -> Path:
    """In the run folder: it belongs to the run's plan, shards and weights."""
    return run_dir / f"reference-{split}.bin"


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


@dataclass(frozen=True, kw_only=True)
class ReferenceScoring:
    """Which log-probabilities are computed, and how. `batch_size`: sequences of a forward."""

    data: DataPlan
    seed: int
    batch_size: int
    score_chunk: int
    precision: str


def reference_files(
    scoring: ReferenceScoring,
    run_dir: Path,
    run: str,
    splits: Sequence[SplitName],
    state: TrainState,
    emit: Emit,
    resume_from: Path | None,
    stop: Callable[[], bool],
) -> dict[SplitName, Path]:
    """The files of the reference model's log-probabilities by split, computed where missing."""
    mesh = state.model_and_optimizer.mesh
    files = {split: reference_file(run_dir, split) for split in splits}
    missing_splits = [
        split for split, file in files.items() if mesh.broadcast_bool(not file.is_file())
    ]

    # The reference model is the model before the first step: a resumed run goes there and comes back.
    computes_again = bool(missing_splits) and resume_from is not None
    if computes_again:
        restore(state, None)
    loaders = {
        split: open_loader(scoring.data, split, mesh=mesh, seed=scoring.seed)
        for split in missing_splits
    }
    total = sum(loader.stored_sequences for loader in loaders.values())
    done = 0
    for split, loader in loaders.items():
        precompute(
            state.model,
            loader,
            files[split],
            batch_size=scoring.batch_size,
            score_chunk=scoring.score_chunk,
            precision=scoring.precision,
            run=run,
            progress=ReferenceProgress(emit, stop, done, total),
            mesh=mesh,
        )
        done += loader.stored_sequences
    if computes_again:
        restore(state, resume_from, non_finite_counts=True)
    return files


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
    device = model.device
    last_report = 0.0
    with ExitStack() as stack:
        stack.enter_context(eval_mode(model))
        writer = None
        if mesh.first_rank:
            writer = stack.enter_context(ReferenceWriter(path, loader.tokens, run))
        for number, (batch, label_indices) in enumerate(loader.stored_batches(batch_size)):
            if mesh.broadcast_bool(time.monotonic() - last_report > REPORT_SECONDS):
                last_report = time.monotonic()
                progress(number * batch_size * mesh.sequence_world)

            # A computation that was killed has left the scores of its first batches.
            indices_by_rank = [indices.numpy() for indices in mesh.all_gather(label_indices)]
            has_scores = writer is not None and all(map(writer.has, indices_by_rank))
            if mesh.broadcast_bool(has_scores):
                continue

            scores_BT = batch_label_scores(
                model, to_device(batch, device), ScoreSettings(score_chunk), precision=precision
            )
            # Of a pipeline the ranks of the last stage, which come last, have scores. Of ranks that share sequences
            # each has those of all tokens.
            scores_by_rank = mesh.all_gather(mesh.all_gather_tokens(scores_BT).cpu())
            if writer is not None:
                for indices, scores in list(zip(indices_by_rank, scores_by_rank, strict=True))[
                    -mesh.data_world :: mesh.context
                ]:
                    writer.add(indices, scores.numpy())
    mesh.barrier()
    progress(loader.stored_sequences)
