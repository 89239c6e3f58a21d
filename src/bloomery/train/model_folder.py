"""The folders of a MODEL argument: a run's checkpoint, a model folder, an adapter and its base. No torch."""

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
    """Quantization, precision and device ("cpu", "cuda") of the run that wrote a checkpoint."""

    quantize: Quantize
    precision: str
    device: str


@dataclass(frozen=True)
class ModelFiles:
    """`weights`: a folder with config.json, or with adapter_config.json; then `base` is the base model's folder."""

    weights: Path
    base: Path | None
    tokenizer: Path
    trained: Trained | None = None  # None: not a run's checkpoint, or the plan has another format


def find_model(model: Path, step: str = "best") -> ModelFiles:
    """Resolve a MODEL argument as `model_folder`, or BASE+ADAPTER. Raises UserError."""
    base, adapter = split(model)
    weights = model_folder(adapter, step)
    if not is_adapter_folder(weights):
        if base is not None:
            fix = "name the folder of an adapter, or a run that trained one, after the +"
            raise UserError(f"not an adapter: {adapter.name}", where=str(adapter), fix=fix)
        return ModelFiles(weights, None, weights, _trained(weights))
    base = base_folder(weights) if base is None else model_folder(base)
    own = any((weights / name).is_file() for name in TOKENIZERS)
    return ModelFiles(weights, base, weights if own else base, _trained(weights))


def _trained(weights: Path) -> Trained | None:
    """From the plan.json of the checkpoint's run."""
    path = weights.parent.parent / "plan.json"
    if weights.parent.name != "checkpoints" or not path.is_file():
        return None
    try:
        plan = read_plan(path)
    except UserError:  # another format: the weights are usable
        return None
    return Trained(plan.quantize, plan.train.precision, plan.train.device)


def split(model: Path) -> tuple[Path | None, Path]:
    """(BASE, ADAPTER) where both are folders, else (None, model): a folder's name may contain a +."""
    text = str(model)
    if not model.exists():
        for place in (number for number, letter in enumerate(text) if letter == "+"):
            base, adapter = Path(text[:place]), Path(text[place + 1 :])
            if base.is_dir() and adapter.is_dir():
                return base, adapter
    return None, model


def model_folder(run_or_folder: Path, step: str = "best") -> Path:
    """The folder with config.json or adapter_config.json.

    `step`: a number, "last", or "best" (the last without an evaluation). Skips damaged newest checkpoints with a
    warning on stderr; a damaged checkpoint named by its number is an error. Raises UserError without a usable one.
    """
    if not run_or_folder.is_dir():
        raise UserError(
            f"no such folder: {run_or_folder.name}", where=str(run_or_folder), fix="name a run or a model folder"
        )
    checkpoints = run_or_folder / "checkpoints"
    if (run_or_folder / "config.json").is_file() or is_adapter_folder(run_or_folder):
        if step not in ("best", "last"):
            problem = f"not a run, so --step {step} does not apply"
            raise UserError(problem, where=str(run_or_folder), fix="leave out --step", code=2)
        if (run_or_folder / MANIFEST).is_file():
            _refuse_unsound(run_or_folder, f"name another folder; delete {MANIFEST} if you changed the files yourself")
        return run_or_folder
    steps = saved_steps(checkpoints)
    if not steps and not (run_or_folder / "recipe.yaml").is_file():
        raise UserError(
            f"neither a model nor a run: {run_or_folder.name}", where=str(run_or_folder),
            fix="name a run, or a folder with config.json and model.safetensors",
        )  # fmt: skip
    if not steps:
        raise UserError(
            "no checkpoint yet", where=str(checkpoints),
            fix="wait for the first checkpoint, or continue with `bloomery resume`",
        )  # fmt: skip
    if step not in ("best", "last"):
        kept = ", ".join(str(number) for number in steps)
        if not step.isdecimal() or int(step) not in steps:
            raise UserError(
                f"no such checkpoint: {step[:40]!r}", where=str(checkpoints), code=2,
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
        print(f"warning: best checkpoint {folder.name} is damaged, using the last: {wrong}", file=sys.stderr)
    newest = newest_valid(checkpoints, on_damage=lambda problem: print(f"warning: {problem}", file=sys.stderr))
    if newest is None:
        fix = "`bloomery resume` trains from the start"
        raise UserError("every checkpoint of this run is damaged", where=str(checkpoints), fix=fix)
    return newest


def _refuse_unsound(folder: Path, fix: str) -> None:
    """Raises UserError for a checkpoint that is damaged or from another run."""
    if wrong := damage(folder):
        raise UserError(f"damaged checkpoint: {wrong}", where=str(folder), fix=fix)
    refuse_other_run(folder)
