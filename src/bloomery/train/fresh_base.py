"""The base of an adapter that no folder holds yet: fresh weights, written into the run once."""

import os
import shutil
from pathlib import Path

from bloomery.model.weights import fresh_decoder, model_state, write_model
from bloomery.plan.types import Plan
from bloomery.recipe.schema import NoAdapter
from bloomery.train.checkpoint import copy_tokenizer


def with_base(plan: Plan, run_dir: Path) -> Plan:
    """The plan with the folder that its adapter's base lies in: `run_dir/base` where it names no model."""
    if isinstance(plan.adapter, NoAdapter) or plan.model.source is not None:
        return plan
    folder = run_dir / "base"
    if not folder.exists():
        _write(plan, folder)
    return plan.model_copy(update={"model": plan.model.model_copy(update={"source": folder.resolve()})})


def _write(plan: Plan, folder: Path) -> None:
    """Whole or not at all."""
    draft = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    write_model(model_state(fresh_decoder(plan.model.config, seed=plan.train.seed)), plan.model.config, draft)
    copy_tokenizer(plan.data.prepared, draft)
    draft.rename(folder)
