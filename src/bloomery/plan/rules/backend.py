"""A model of transformers' layers in a plan: that it is one, what it cannot have, which attention it takes."""

from collections.abc import Iterator
from pathlib import Path

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.hub import cached_model
from bloomery.model.config import Foreign, ModelConfig
from bloomery.model.families.presets import stated_config
from bloomery.model.families.registry import architecture_of
from bloomery.model.quantization.sizes import Reader, storage_bytes
from bloomery.recipe.schema import Lora, Peft, Recipe

MANY = 2**24  # weights, to say how many bits one takes: the scales of scales are spread over all


def refuse_quantised_misfits(recipe: Recipe) -> None:
    """Raises UserError where the quantised weights themselves would have to learn."""
    if recipe.quantize.base != "none" and recipe.adapter.kind == "none":
        raise UserError(
            f"{recipe.quantize.base} weights cannot learn: they stand still under an adapter",
            where=f"quantize.base={recipe.quantize.base}",
            remedy="set adapter.kind=lora, or quantize.base=none to train every weight",
            code=2,
        )


def quantised_choices(recipe: Recipe, reader: Choice[Reader]) -> Iterator[tuple[str, Choice[str]]]:
    """By key, in how many bits what is kept, and who reads it."""
    base, double = recipe.quantize.base, recipe.quantize.double
    if base == "none":
        return
    bits = 8 * storage_bytes((MANY,), base, double) / MANY
    yield "quantize.base", Choice(f"{base} base", f"{bits:.4g} bits a weight of the layers; {reader.because}")


def refuse_foreign_misfits(recipe: Recipe, config: ModelConfig, *, devices: int) -> None:
    """Raises UserError for what transformers' layers do not have here."""
    if config.foreign is None:
        return
    where, problem, remedy = "model.implementation=foreign", None, None
    if recipe.objective.spec.values:
        problem = f"a reward model's head stands on Bloomery's own decoder, which lacks {architecture_of(config)}"
        where, remedy = f"objective.kind={recipe.objective.kind}", "choose a model of the families in docs/models.md"
    elif devices > 1:
        problem = "transformers' layers train on one device here: no tensor, pipeline or context parallelism"
        remedy = "leave out --gpus and --nodes"
    elif recipe.model.dropout is not None:
        problem = "transformers' layers take dropout from their own config.json"
        where, remedy = "model.dropout", "take it out, or set the rates in the model's config.json"
    elif _head_of_two_names(recipe, config.foreign):
        problem = "files and layers of this architecture name its head differently, and PEFT would not find it again"
        where, remedy = "adapter.train_also", "take lm_head out, or train the whole model: adapter.kind=none"
    elif isinstance(recipe.adapter, Peft) and (recipe.adapter.model_extra or {}).get("modules_to_save"):
        problem = "a method of PEFT changes the layers of this architecture and nothing beside them"
        where, remedy = "adapter.modules_to_save", "take it out, or set adapter.kind=lora adapter.train_also=[...]"
    elif recipe.train.compile is True:
        problem = "transformers' layers are not compiled here"
        where, remedy = "train.compile", "set train.compile=auto"
    elif recipe.data.layout == "packed" and _window(config) < recipe.data.sequence_length:
        problem = f"transformers' layers look at {_window(config):,} tokens, and a mask of documents would widen that"
        where, remedy = "data.layout=packed", "set data.layout=padded, or a shorter data.sequence_length"
    if problem is not None and remedy is not None:
        raise UserError(problem, where=where, remedy=remedy, code=2)


def _head_of_two_names(recipe: Recipe, foreign: Foreign) -> bool:
    stored = next((theirs for ours, theirs, _ in foreign.parameters if ours == "lm_head.weight"), "lm_head.weight")
    asked = isinstance(recipe.adapter, Lora) and any("lm_head" in name for name in recipe.adapter.train_also)
    return asked and stored != "lm_head.weight"


def _window(config: ModelConfig) -> float:
    return min((window for window in config.sliding_window if window is not None), default=float("inf"))


def foreign_attention(asked: str, foreign: Foreign, *, packed: bool) -> Choice[str]:
    """The backend whose memory and time transformers' attention has. Raises UserError where another is asked for."""
    own = "math" if foreign.attention == "eager" else "mask" if packed else "sdpa"
    if asked not in ("auto", own):
        problem = f"transformers' layers have attention of their own, and not {asked}"
        raise UserError(problem, where="train.attention", remedy="set train.attention=auto", code=2)
    because = {
        "math": "this architecture writes its scores out in transformers",
        "mask": "torch's own kernel with a mask of documents, as transformers calls it",
        "sdpa": "torch's own kernel as transformers calls it: one document a row",
    }[own]
    return Choice(own, because)


def unrun_programs(recipe: Recipe, config: ModelConfig) -> Iterator[str]:
    """What a model brings that is never run, and what it is taken for instead: the two may differ."""
    folder = None if recipe.model.from_ is None else cached_model(recipe.model.from_)
    if folder is None:
        return
    said, taken = stated_config(folder), architecture_of(config)
    kind, name = said.get("model_type"), str(recipe.model.from_)
    name = folder.name if Path(name).exists() else name
    if said.get("auto_map"):
        yield f"{name} names a program of its own (auto_map), which is never run: taken as {taken}"
    elif isinstance(kind, str) and config.foreign is None and kind != config.family:
        yield f"{name} is of a kind that nobody here knows ({kind[:60]}): taken as {taken}, as architectures says"


def foreign_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key, whose layers compute the model, and how they are loaded."""
    if config.foreign is None:
        if recipe.model.safe_load:
            because = "our decoder computes all that files do not hold, and refuses a file that lacks a tensor"
            yield "model.safe_load", Choice("every load is safe", because)
        return
    asked = f"our decoder lacks {architecture_of(config)}"
    if recipe.model.implementation == "foreign":
        asked = "the recipe asks for it"
    lacks = "no tensor, pipeline or context parallelism"
    yield "model.implementation", Choice("transformers' layers", f"{asked}; {lacks}, adapters and our head as ever")
    if because := config.foreign.safe_because:
        yield "model.safe_load", Choice("safe load", f"transformers reads the weights itself, as {because}")
