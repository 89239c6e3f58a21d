"""The loss of each packed sequence of a run's validation set, by the run's own objective: of pairs, of pictures"""

from pathlib import Path

import numpy as np
import torch

from bloomery.core.progress import progress
from bloomery.core.units import counted
from bloomery.evals.statistics import Scores
from bloomery.infer.forward import eval_mode, to_device
from bloomery.parallel.mesh import SINGLE_RANK
from bloomery.plan.choices import reference_of
from bloomery.plan.store import read_identity, read_plan
from bloomery.train.batch_source import open_loader
from bloomery.train.evaluation.evaluation import complete_batches
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.reference_files import reference_file
from bloomery.train.objectives.reference_model import build_reference_model
from bloomery.train.process import set_up_process
from bloomery.train.set_up import with_base
from bloomery.train.state import build_state
from bloomery.train.step import compute_loss


def losses_as_trained(run: Path, weights: Path) -> Scores | None:
    """The objective's loss, float64 [sequences], and what it is counted per (pairs, responses or tokens) of all packed
    sequences of the validation set. Their sums' ratio is the loss of the run's own evaluation of as many sequences.

    `weights`: the folder of a checkpoint. The reference model is the one of the training: the base below the adapter,
    or the stored log-probabilities. None where one device cannot compute that: of a run on several devices, and where
    the reference log-probabilities are gone. Raises UserError.
    """
    plan = read_plan(run / "plan.json")
    needs_file = (
        reference_of(plan.objective, plan.adapter, plan.vision.train).value == "precomputed"
    )
    file = reference_file(run, "validation") if needs_file else None
    if plan.train.ranks > 1 or (file is not None and not file.is_file()):
        return None
    # Sequences one by one have another shape than those that the run compiled for.
    train = plan.train.model_copy(update={"compile": False})
    plan = with_base(plan.model_copy(update={"train": train}), run)
    set_up_process(train, memory_limit=plan.memory_limit_of(0))

    state = build_state(plan, run_dir=run)
    state.checkpointed_model.read(weights)
    reference = build_reference_model(plan, state.model, run_dir=run, mesh=SINGLE_RANK)
    objective = build_objective(plan, value_head=state.model.value_head, reference=reference)
    identity = read_identity(run)
    loader = open_loader(
        plan.data,
        "validation",
        file,
        "" if identity is None else identity.run,
        seed=train.seed,
        top_scores=plan.objective.stored_scores,
    )
    values = []
    weights_of_sequences = []
    with eval_mode(state.model), torch.no_grad():
        for batch in complete_batches(state.model, loader.validation_batches(1), objective):
            parts = compute_loss(
                state.model,
                to_device(batch, state.model.device),
                objective,
                precision=train.precision,
            )
            values.append(float(parts.total))
            weights_of_sequences.append(float(parts.count))
            progress(f"{len(values):,} of {counted(loader.sequences, 'sequences')}")
    return Scores("eval.loss", np.array(values), np.array(weights_of_sequences))
