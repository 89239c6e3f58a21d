"""Which folders a MODEL means: a run's checkpoint, a model's folder, an adapter and its base. No torch."""

import sys
from dataclasses import dataclass
from pathlib import Path

from bloomery.core.errors import UserError
from bloomery.model.adapters.base_model import base_folder, is_adapter_folder
from bloomery.plan.store import read_plan
from bloomery.recipe.schema import Quantize
from bloomery.train.sealed import MANIFEST, best_step, damage, newest_valid, refuse_other_run, saved_steps, step_folder

TOKENIZERS = ("tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Trained:
    """How the run that wrote a checkpoint computed: its frozen weights, its precision, and `device`: cpu or cuda."""

    quantize: Quantize
    precision: str
    device: str


@dataclass(frozen=True)
class ModelFiles:
    """`weights` holds config.json, or adapter_config.json; then `base` is the model that it adapts."""

    weights: Path
    base: Path | None
    tokenizer: Path
    trained: Trained | None = None  # None: no run's checkpoint, or one of another version's plan


def find_model(model: Path, step: str = "best") -> ModelFiles:
    """What `model` means: as `model_folder` says, or BASE+ADAPTER, which chooses the base. Raises UserError."""
    base, adapter = split(model)
    weights = model_folder(adapter, step)
    if not is_adapter_folder(weights):
        if base is not None:
            fix = "name the folder of an adapter, or a run that trained one, after the +"
            raise UserError("this is a whole model, not an adapter", where=str(adapter), fix=fix)
        return ModelFiles(weights, None, weights, _trained(weights))
    base = base_folder(weights) if base is None else model_folder(base)
    own = any((weights / name).is_file() for name in TOKENIZERS)
    return ModelFiles(weights, base, weights if own else base, _trained(weights))


def _trained(weights: Path) -> Trained | None:
    """As the plan of the run says, in whose folder a checkpoint lies."""
    path = weights.parent.parent / "plan.json"
    if weights.parent.name != "checkpoints" or not path.is_file():
        return None
    try:
        plan = read_plan(path)
    except UserError:  # of another version: the weights can be used all the same
        return None
    return Trained(plan.quantize, plan.train.precision, plan.train.device)


def split(model: Path) -> tuple[Path | None, Path]:
    """BASE and ADAPTER where both are folders, else nothing and the whole; a folder may have a + in its name."""
    text = str(model)
    if not model.exists():
        for place in (number for number, letter in enumerate(text) if letter == "+"):
            base, adapter = Path(text[:place]), Path(text[place + 1 :])
            if base.is_dir() and adapter.is_dir():
                return base, adapter
    return None, model


def model_folder(run_or_folder: Path, step: str = "best") -> Path:
    """The folder that holds config.json or an adapter.

    `step`: a number, "last", or "best" (the last where no evaluation was noted).
    A damaged newest checkpoint is passed over with a line on stderr; a damaged one that was asked for by its number is
    refused. Raises UserError when there is nothing to take.
    """
    if not run_or_folder.is_dir():
        raise UserError("there is no such folder", where=str(run_or_folder), fix="name a run or a model's folder")
    checkpoints = run_or_folder / "checkpoints"
    if (run_or_folder / "config.json").is_file() or is_adapter_folder(run_or_folder):
        if step not in ("best", "last"):
            problem = f"this is one model, it has no step {step}"
            raise UserError(problem, where=str(run_or_folder), fix="leave out --step", code=2)
        if (run_or_folder / MANIFEST).is_file():
            _refuse_unsound(run_or_folder, f"name another one; delete {MANIFEST} where you changed the folder yourself")
        return run_or_folder
    steps = saved_steps(checkpoints)
    if not steps and not (run_or_folder / "recipe.yaml").is_file():
        raise UserError(
            "the folder holds neither a model nor a run", where=str(run_or_folder),
            fix="name a run, or a folder with config.json and model.safetensors",
        )  # fmt: skip
    if not steps:
        raise UserError(
            "this run has no checkpoint yet", where=str(checkpoints),
            fix="wait until it saves one, or let `bloomery resume` go on with it",
        )  # fmt: skip
    if step not in ("best", "last"):
        kept = ", ".join(str(number) for number in steps)
        if not step.isdecimal() or int(step) not in steps:
            raise UserError(
                f"there is no checkpoint {step[:40]!r}", where=str(checkpoints), code=2,
                fix=f"choose best, last or one of {kept}",
            )  # fmt: skip
        folder = step_folder(checkpoints, int(step))
        _refuse_unsound(folder, f"choose another of {kept}")
        return folder
    best = best_step(checkpoints) if step == "best" else None
    if best is not None:
        folder = step_folder(checkpoints, best)
        if (wrong := damage(folder)) is None:
            refuse_other_run(folder)
            return folder
        print(f"warning: the best checkpoint, {folder.name}, is not used: {wrong}", file=sys.stderr)
    newest = newest_valid(checkpoints, on_damage=lambda told: print(f"warning: {told}", file=sys.stderr))
    if newest is None:
        fix = "`bloomery resume` trains it again from the start"
        raise UserError("every checkpoint of this run is damaged", where=str(checkpoints), fix=fix)
    return newest


def _refuse_unsound(folder: Path, fix: str) -> None:
    """Raises UserError for a checkpoint that is damaged, or of another run than the one that it is in."""
    if wrong := damage(folder):
        raise UserError(f"the checkpoint is damaged: {wrong}", where=str(folder), fix=fix)
    refuse_other_run(folder)
