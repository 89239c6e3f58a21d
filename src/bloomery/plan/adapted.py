"""What an adapter and new tokens mean for a run, in words: what is trained of how much, which rows are new."""

from collections.abc import Iterator

from bloomery.choice import Choice
from bloomery.data.tokenizer_source import new_tokens
from bloomery.errors import UserError
from bloomery.model.adapter_names import adaptation, refuse_untrained_rows
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.model.presets import known_config
from bloomery.recipe.schema import Lora, NoAdapter, Peft, Recipe
from bloomery.units import format_count


def refuse_new_rows(recipe: Recipe, config: ModelConfig) -> None:
    """Raises UserError where an adapter would leave new tokens untrained."""
    if isinstance(recipe.adapter, NoAdapter) or (known := known_tokens(recipe)) is None:
        return
    # Where the vocabulary is padded (Qwen2.5), new tokens take rows that are there and were never learned.
    new = max(config.vocab_size - known, new_tokens(recipe))
    if isinstance(recipe.adapter, Lora):
        refuse_untrained_rows(config, recipe.adapter, new=new)
    if isinstance(recipe.adapter, Peft) and new:
        raise UserError(
            f"{new} tokens are new to the model, and a method of PEFT would never learn them",
            where=f"adapter.method={recipe.adapter.method}",
            remedy="set adapter.kind=lora adapter.train_also=[embed_tokens, lm_head]", code=2,
        )  # fmt: skip


def known_tokens(recipe: Recipe) -> int | None:
    """The vocabulary of the model that training starts from; None for a fresh one."""
    return None if recipe.model.from_ is None else known_config(recipe.model.from_).vocab_size


def adapter_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and what it means for this model."""
    if isinstance(recipe.adapter, Lora):
        yield "adapter.kind", Choice(f"{_kind(recipe.adapter)}, rank {recipe.adapter.rank}", _share(recipe, config))
    known = known_tokens(recipe)
    if known is not None and (new := max(config.vocab_size - known, new_tokens(recipe))):
        told = f"{new:,} new token{'s' if new > 1 else ''}"
        yield "model.vocab_size", Choice(told, "rows of the embedding and the head begin as the mean of the others")


def _kind(adapter: Lora) -> str:
    names = {"lora": "LoRA", "dora": "DoRA"}
    scale, start = " (rsLoRA)" if adapter.scale == "rslora" else "", " from PiSSA" if adapter.init == "pissa" else ""
    return f"{names[adapter.kind]}{scale}{start}"


def _share(recipe: Recipe, config: ModelConfig) -> str:
    assert isinstance(recipe.adapter, Lora)
    settings, total = adaptation(config, recipe.adapter), parameter_count(config)
    trained = settings.trained(config)
    told = f"{format_count(trained)} numbers are trained, {trained / total:.2%} of the model's {format_count(total)}"
    return f"{told}, on {len(settings.pairs):,} matrices"
