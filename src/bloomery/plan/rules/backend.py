"""A model of transformers' layers in a plan: that it is one, what it cannot have, which attention it takes."""

from collections.abc import Iterator

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.model.config import ModelConfig, TransformersBackend
from bloomery.model.families.registry import architecture_of
from bloomery.recipe.schema import Lora, Peft, Recipe


def refuse_transformers_misfits(recipe: Recipe, config: ModelConfig, *, devices: int) -> None:
    """Raises UserError for what transformers' layers do not have here."""
    if config.transformers_backend is None:
        return
    where, problem, fix = "model.implementation=transformers", None, None
    window = min((window for window in config.sliding_window if window is not None), default=float("inf"))
    names = (theirs for ours, theirs, _ in config.transformers_backend.parameters if ours == "lm_head.weight")
    stored = next(names, "lm_head.weight")
    head = isinstance(recipe.adapter, Lora) and any("lm_head" in name for name in recipe.adapter.modules_to_save)
    if recipe.objective.spec.values:
        problem = f"a reward model's head stands on Bloomery's own decoder, which lacks {architecture_of(config)}"
        where, fix = f"objective.kind={recipe.objective.kind}", "choose a model family of docs/reference/models.md"
    elif devices > 1:
        problem = "transformers' layers train on one device here: no tensor, pipeline or context parallelism"
        fix = "leave out --gpus and --nodes"
    elif recipe.model.dropout is not None:
        problem = "transformers' layers take dropout from their own config.json"
        where, fix = "model.dropout", "take it out, or set the rates in the model's config.json"
    elif head and stored != "lm_head.weight":
        problem = "files and layers of this architecture name its head differently, and PEFT would not find it again"
        where, fix = "adapter.modules_to_save", "take lm_head out, or train the whole model: adapter.kind=none"
    elif isinstance(recipe.adapter, Peft) and (recipe.adapter.model_extra or {}).get("modules_to_save"):
        problem = "a method of PEFT changes the layers of this architecture and nothing beside them"
        where, fix = "adapter.modules_to_save", "take it out, or set adapter.kind=lora adapter.modules_to_save=[...]"
    elif recipe.train.compile is True:
        problem = "transformers' layers are not compiled here"
        where, fix = "train.compile", "set train.compile=auto"
    elif recipe.data.layout == "packed" and window < recipe.data.sequence_length:
        problem = f"transformers' layers look at {window:,} tokens, and a mask of documents would widen that"
        where, fix = "data.packing=true", "set data.packing=false, or a shorter data.sequence_length"
    if problem is not None and fix is not None:
        raise UserError(problem, where=where, fix=fix, code=2)


def transformers_attention(asked: str, transformers_backend: TransformersBackend, *, packed: bool) -> Choice[str]:
    """The backend whose memory and time transformers' attention has. Raises UserError where another is asked for."""
    own = "math" if transformers_backend.attention == "eager" else "mask" if packed else "sdpa"
    if asked not in ("auto", own):
        problem = f"transformers' layers have attention of their own, and not {asked}"
        raise UserError(problem, where="train.attention", fix="set train.attention=auto", code=2)
    reason = {
        "math": "this architecture writes its scores out in transformers",
        "mask": "torch's own kernel with a mask of documents, as transformers calls it",
        "sdpa": "torch's own kernel as transformers calls it: one document a row",
    }[own]
    return Choice(own, reason)


def transformers_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key, whose layers compute the model, and how they are loaded."""
    if config.transformers_backend is None:
        if recipe.model.load_with == "transformers":
            reason = "our decoder computes all that files do not hold, and refuses a file that lacks a tensor"
            yield "model.load_with", Choice("every load is safe", reason)
        return
    asked = f"our decoder lacks {architecture_of(config)}"
    if recipe.model.implementation == "transformers":
        asked = "the recipe asks for it"
    lacks = "no tensor, pipeline or context parallelism"
    yield "model.implementation", Choice("transformers' layers", f"{asked}; {lacks}, adapters and our head as ever")
    if reason := config.transformers_backend.safe_reason:
        yield "model.load_with", Choice("safe load", f"transformers reads the weights itself, as {reason}")
