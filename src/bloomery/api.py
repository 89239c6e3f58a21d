"""Bloomery from Python: plain functions, which `import bloomery` offers too. Each imports what it needs when called.

`model` is what the command line takes: a folder in Hugging Face's layout, a run or its name, a Hub id, BASE+ADAPTER.
`device`: auto (the GPU where one can be used), cpu, or a GPU's number; set it before torch is imported. `step`: a run's
checkpoint: best, last or a number. `tell` gets a line about what is loaded. All of them raise UserError.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bloomery.core.errors import UserError

if TYPE_CHECKING:
    from bloomery.export.layouts import Exported
    from bloomery.model.decoder import Decoder
    from bloomery.model.sampling import Sampling
    from bloomery.plan.types import RunPlan
    from bloomery.runs.evaluate import Evaluation
    from bloomery.train.evaluation.scoring import PairMetrics
    from bloomery.train.run import Run

Layout = Literal["hf", "adapter", "merged"]
Tell = Callable[[str], None]


def load(folder: str | Path) -> "Decoder":
    """The decoder in a folder of Hugging Face's layout (a checkpoint, an export, a download), ready to evaluate."""
    from bloomery.model.io.weights import load_decoder

    return load_decoder(Path(folder))


def train(recipe: str | Path, overrides: Sequence[str] = (), *, run_dir: Path | None = None) -> "Run":
    """Train a recipe (a file or a packaged name) in a process of its own, without output."""
    from bloomery.recipe.load import load_recipe
    from bloomery.runs.lifecycle import start

    return start(load_recipe(recipe, overrides), run_dir=run_dir, quiet=True)


def plan(recipe: str | Path, overrides: Sequence[str] = (), *, gpu: str | None = None) -> "RunPlan":
    """The plan of a recipe (a file or a packaged name) for this machine, or for `gpu`."""
    from bloomery.plan.local import local_plan
    from bloomery.recipe.load import load_recipe

    return local_plan(load_recipe(recipe, overrides), gpu=gpu)[0]


def evaluate(
    model: str | Path, data: str | Path | None = None, *, step: str = "best", bos: bool = True,
    template: str | None = None, device: str = "auto", quantize: str | None = None,
    tell: Tell = lambda _: None, note: Tell = lambda _: None,
) -> "Evaluation | PairMetrics":  # fmt: skip
    """How well a model predicts `data` (a text, a data file or a folder), or a reward model judges the pairs in it.

    `data`: None examines a run on its validation split. `bos`: whether a BOS goes before each text, so that its first
    token is scored too. `template`: how conversations are written, by default as the tokenizer says. `note` gets each
    sentence that a reader of the result must know.
    """
    from bloomery.runs.names import chosen_use, model_path

    folder = model_path(str(model))
    use = chosen_use(device, quantize)  # before torch is imported
    from bloomery.runs.evaluate import evaluate_model

    data = None if data is None else Path(data)
    result, notes = evaluate_model(folder, data, step=step, bos=bos, template=template, use=use, tell=tell)
    for text in notes:
        note(text)
    return result


def generate(
    model: str | Path, prompt: str, *, sampling: "Sampling | None" = None, stop: Sequence[str] = (),
    chat: bool = False, step: str = "best", device: str = "auto", quantize: str | None = None,
    tell: Tell = lambda _: None,
) -> str:  # fmt: skip
    """What the model writes after `prompt`, or (`chat`) answers to it by its own chat template, until one of `stop`."""
    from bloomery.runs.names import chosen_use, model_path

    folder = model_path(str(model))
    use = chosen_use(device, quantize)  # before torch is imported
    from bloomery.model.sampling import Sampling
    from bloomery.runs.generate import load_model, writer

    decoder, tokenizer = load_model(folder, step=step, use=use, tell=tell)
    with writer(decoder, tokenizer, sampling or Sampling(), stop, chat=chat) as answer:
        return "".join(answer(prompt))


def export(
    model: str | Path, out: str | Path, *, layout: Layout = "hf", dtype: str | None = None, step: str = "best",
    verify: bool = True, device: str = "auto",
) -> "Exported":  # fmt: skip
    """Writes a model to the new folder `out`: whole for transformers and kin, its adapter for PEFT, or both merged.

    `dtype`: of merged weights; None keeps the base's. `verify`: reads the copy back, compares it and runs it.
    """
    if dtype is not None and layout != "merged":
        problem = f"--to {layout} copies the weights as they are"
        raise UserError(problem, where="--type", fix="leave out --type", code=2)
    from bloomery.runs.names import chosen_use, model_path

    folder = model_path(str(model))
    use = chosen_use(device)  # before torch is imported
    from bloomery.export import layouts
    from bloomery.train.model_folder import find_model

    found = find_model(folder, step)
    if layout == "adapter":
        return layouts.export_adapter(found, Path(out), verify=verify, use=use)
    if layout == "merged":
        return layouts.export_merged(found, Path(out), dtype=dtype, verify=verify, use=use)
    return layouts.export(found.weights, Path(out), verify=verify, use=use)
