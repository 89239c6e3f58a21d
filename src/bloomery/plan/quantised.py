"""A base in 4 or 8 bits: what it needs, what it means in this run, and whose kernels read it."""

from collections.abc import Iterator

from bloomery.choice import Choice
from bloomery.errors import UserError
from bloomery.model.quantize_facts import Reader, storage_bytes
from bloomery.recipe.schema import Recipe

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
