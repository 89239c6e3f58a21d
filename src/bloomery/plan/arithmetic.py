"""What training a pretrained model holds before any activation: 16 bytes a parameter in full, and what a plan holds"""

from collections.abc import Iterator

from bloomery.choice import Choice
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.plan.states import FULL, Way, adapter_bytes, held_bytes, largest, learning_bytes, optimizer_bytes, way_of
from bloomery.recipe.schema import Recipe
from bloomery.units import format_count


def arithmetic_choices(recipe: Recipe, config: ModelConfig, *, precision: str) -> Iterator[tuple[str, Choice[str]]]:
    """By key, bytes of weights, gradients and states beside those of training everything."""
    if recipe.model.from_ is None:
        return
    whole = state_parts(config, FULL, "adamw", "bfloat16")
    each = {name: size / parameter_count(config) for name, size in whole.items()}
    rule = f"{sum(each.values()):.0f} bytes ({', '.join(f'{name} {size:.0f}' for name, size in each.items())})"
    held = state_parts(config, way_of(recipe, config), recipe.optimizer.kind, precision)
    count, in_full = format_count(parameter_count(config)), _decimal(sum(whole.values()))
    if held == whole:
        yield "model.from", Choice(f"{in_full} to train all", f"each of {count} parameters holds {rule}")
        return
    told = ", ".join(f"{name} {_decimal(size)}" for name, size in held.items())
    because = f"{told}; in full with AdamW each of {count} parameters holds {rule}"
    yield "model.from", Choice(f"{_decimal(sum(held.values()))}, not {in_full}", because)


def state_parts(config: ModelConfig, way: Way, kind: str, precision: str) -> dict[str, float]:
    """Bytes that lie there whatever the text is. A gradient that is used in backward is the largest one alone."""
    learning = largest(config, way, precision) if way.in_backward else learning_bytes(config, way, precision)
    return {
        "weights": held_bytes(config, way, precision) + adapter_bytes(config, way),
        "gradients": learning,
        "states": optimizer_bytes(config, way, kind, precision),
    }


def _decimal(size: float) -> str:
    """In decimal units, as this arithmetic is done everywhere."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
