"""Where the steps of a run get their micro-batches: the prepared dataset.

A source is an implementation of `BatchSource` and an entry of `SOURCES` in `train.set_up`; an objective names its
source in its `ObjectiveSpec`. The loop does not know which one it has.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, final

from bloomery.data.batch import Batch
from bloomery.data.loader import Loader, Prefetcher
from bloomery.data.shards import SplitName
from bloomery.data.tokenizer.tokenizer import Tokenizer
from bloomery.data.top_scores import scores_files
from bloomery.infer.forward import pinned
from bloomery.model.decoder import Decoder
from bloomery.monitor.events import Emit
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import DataPlan, RunPlan
from bloomery.train.objectives.objective import TEACHER_HIDDEN
from bloomery.train.objectives.text_spans import TEACHER_SPAN_LOGPS
from bloomery.train.scorers.client import ScoredBefore, Scorers
from bloomery.train.state import TrainState


@dataclass(frozen=True)
class StepBatches:
    """The micro-batches of one step on this rank.

    Once the step is taken, the run's cursor advances by `consumed`: sequences or prompts of the dataset, of all ranks
    together. `tokens`: of all ranks; None: those of the plan, with padding. `metrics` and `seconds` of making them.
    """

    batches: list[Batch]
    consumed: int
    tokens: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def asked(self, teacher: ScoredBefore) -> "StepBatches":
        """The same step, whose micro-batches are with the processes that score."""
        return replace(self, batches=teacher.ask(self.batches))


def asked_ahead(inputs: "SourceInputs") -> ScoredBefore | None:
    """What sends micro-batches to a teacher in scoring processes, before their step; None without one."""
    plan = inputs.plan
    if inputs.scorers is None or plan.objective.taught_by is None:
        return None
    return ScoredBefore(inputs.scorers, TEACHER_SPAN_LOGPS if plan.aligns_texts else TEACHER_HIDDEN)


class BatchSource(Protocol):
    """Where steps get their micro-batches: a prepared dataset, or rollouts of the current policy."""

    def steps(self, plan: RunPlan) -> AbstractContextManager[Iterator[StepBatches]]:
        """An endless iterator over the steps from the state's cursor on; `next` blocks until a step is available.

        A rewind or another micro-batch size ends the block and begins a new one, with the plan of that time.
        """


@dataclass(frozen=True, kw_only=True)
class SourceInputs:
    """What sources are built from. `reference`: the run's file of reference log-probabilities; `reference_model`:
    a frozen copy of the start, where rollouts need one; `run`: the run's identity; `scorers`: the processes that score
    for this rank.

    `stop`: whether you asked the run to stop, the same on all ranks. `time_is_up`: whether the time of a wall-time run
    is over, asked on the first rank.
    """

    plan: RunPlan
    state: TrainState
    tokenizer: Tokenizer
    run_dir: Path
    emit: Emit
    stop: Callable[[], bool]
    time_is_up: Callable[[], bool] = lambda: False
    reference: Path | None = None
    reference_model: Decoder | None = None
    run: str = ""
    scorers: Scorers | None = None


@final
class DatasetSource:
    """The sequences of the training split, read ahead by a thread."""

    def __init__(self, inputs: SourceInputs) -> None:
        mesh = inputs.state.model_and_optimizer.mesh
        self._state = inputs.state
        self._loader = open_loader(
            inputs.plan.data,
            "train",
            inputs.reference,
            inputs.run,
            mesh,
            seed=inputs.plan.train.seed,
            top_scores=inputs.plan.objective.stored_scores,
        )
        self._ahead = asked_ahead(inputs)

    @contextmanager
    def steps(self, plan: RunPlan) -> Iterator[Iterator[StepBatches]]:
        train = plan.train
        prefetcher = Prefetcher(
            self._loader,
            self._state.cursor,
            batch_size=train.micro_batch_size * train.data_parallel,
            step_size=train.sequences_per_step,
            depth=plan.data.prefetch,
        )

        def steps() -> Iterator[StepBatches]:
            while True:
                batches = [prefetcher.next() for _ in range(train.accumulation)]
                yield StepBatches(batches, train.sequences_per_step)

        def steps_ahead(teacher: ScoredBefore) -> Iterator[StepBatches]:
            """Each is sent to the processes that score while the one before it trains."""
            upcoming = next(all_steps).asked(teacher)
            while True:
                current = upcoming
                upcoming = next(all_steps).asked(teacher)
                yield current

        all_steps = steps()

        with prefetcher:
            yield all_steps if self._ahead is None else steps_ahead(self._ahead)


def open_loader(
    data: DataPlan,
    split: SplitName,
    reference: Path | None = None,
    run: str = "",
    mesh: Mesh = SINGLE_RANK,
    *,
    seed: int,
    top_scores: str | None = None,
) -> Loader:
    """`reference` and `run` as of `Loader`. `top_scores`: the files of a teacher's, by their name or pattern."""
    return Loader(
        data.prepared,
        sequence_length=data.sequence_length,
        layout=data.layout,
        seed=seed,
        split=split,
        data_rank=mesh.sequence_rank,
        data_world=mesh.sequence_world,
        context_rank=mesh.context_rank,
        context=mesh.context,
        reference=reference,
        run=run,
        top_scores=() if top_scores is None else scores_files(top_scores),
        prepare=pinned if data.pin_memory else None,
    )
