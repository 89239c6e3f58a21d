"""The transformers implementation in a plan: unsupported settings, attention."""

from collections.abc import Iterator

from bloomery.core import Choice
from bloomery.core.errors import UserError
from bloomery.model.config import ModelConfig, TransformersBackend
from bloomery.model.families.registry import architecture_of
from bloomery.recipe.schema import Lora, Peft, Recipe


def refuse_transformers_misfits(recipe: Recipe, config: ModelConfig) -> None:
    """Raises UserError for settings that the transformers implementation does not support."""
    if config.transformers_backend is None:
        return
    where, problem, fix = "model.implementation=transformers", None, None
    window = min((window for window in config.sliding_window if window is not None), default=float("inf"))
    names = (theirs for ours, theirs, _ in config.transformers_backend.parameters if ours == "lm_head.weight")
    stored = next(names, "lm_head.weight")
    head = isinstance(recipe.adapter, Lora) and any("lm_head" in name for name in recipe.adapter.modules_to_save)
    if recipe.objective.spec.values:
        problem = f"reward models need the native implementation, which does not support {architecture_of(config)}"
        where, fix = f"objective.kind={recipe.objective.kind}", "choose a model family of docs/reference/models.md"
    elif recipe.model.dropout is not None:
        problem = "the transformers implementation takes dropout from config.json"
        where, fix = "model.dropout", "remove it, or set dropout in the model's config.json"
    elif head and stored != "lm_head.weight":
        problem = "the head of this architecture has another name in its files: PEFT cannot load it"
        where, fix = "adapter.modules_to_save", "remove lm_head, or set adapter.kind=none to train all parameters"
    elif isinstance(recipe.adapter, Peft) and (recipe.adapter.model_extra or {}).get("modules_to_save"):
        problem = "modules_to_save is not supported for PEFT methods on this architecture"
        where, fix = "adapter.modules_to_save", "remove it, or set adapter.kind=lora adapter.modules_to_save=[...]"
    elif recipe.train.compile is True:
        problem = "compilation is not supported for the transformers implementation"
        where, fix = "train.compile", "set train.compile=auto"
    elif recipe.data.layout == "packed" and window < recipe.data.sequence_length:
        problem = f"packing is not supported for the sliding window of transformers' layers: {window:,} tokens"
        where, fix = "data.packing=true", "set data.packing=false, or a shorter data.sequence_length"
    if problem is not None and fix is not None:
        raise UserError(problem, where=where, fix=fix, code=2)


def transformers_attention(asked: str, transformers_backend: TransformersBackend, *, packed: bool) -> Choice[str]:
    """The backend with the memory and time of transformers' attention. Raises UserError for any other."""
    own = "math" if transformers_backend.attention == "eager" else "mask" if packed else "sdpa"
    if asked not in ("auto", own):
        problem = f"the transformers implementation does not support this attention: {asked}"
        raise UserError(problem, where="train.attention", fix="set train.attention=auto", code=2)
    reason = {
        "math": "transformers computes every attention score of this architecture (eager)",
        "mask": "PyTorch's kernel with a document mask, as transformers calls it",
        "sdpa": "PyTorch's kernel as transformers calls it: one document per sequence",
    }[own]
    return Choice(own, reason)


def transformers_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the implementation, and how weights are loaded."""
    if config.transformers_backend is None:
        if recipe.model.load_with == "transformers":
            reason = "the native implementation refuses a file that lacks a tensor"
            yield "model.load_with", Choice("safe load", reason)
        return
    asked = f"no native implementation of {architecture_of(config)}"
    if recipe.model.implementation == "transformers":
        asked = "set in the recipe"
    lacks = "no tensor, pipeline or context parallelism"
    yield "model.implementation", Choice("transformers", f"{asked}; {lacks}")
    if reason := config.transformers_backend.safe_reason:
        yield "model.load_with", Choice("safe load", f"transformers loads the weights, as {reason}")
