"""Keys with several values, `key=a,b`, of `bloomery sweep` and `bloomery bench --sweep`"""

from collections.abc import Sequence

from bloomery.core.errors import UserError
from bloomery.recipe.schema import Recipe


def axes_of(arguments: Sequence[str], *, where: str, example: str) -> dict[str, tuple[str, ...]]:
    """`["train.compile=true,false", "adapter.targets=[q,v],[q]"]` as the values of each key, in order.

    Commas inside brackets and quotes belong to a value. `where` and `example`: for the UserError (code 2) about an
    argument without a key or a value, and about a key that is named twice.
    """
    axes: dict[str, tuple[str, ...]] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        values = tuple(dict.fromkeys(value for value in split_outside_brackets(text) if value))
        is_key = "." in key or key in Recipe.model_fields  # adapter=lora,none
        if not equals or not is_key or not values:
            fix = f"write {example}"
            raise UserError(f"not a sweep: {argument}", where=where, fix=fix, code=2)
        if key in axes:
            fix = f"put all values into one: {key}=a,b,c"
            raise UserError(f"this key is there twice: {key}", where=where, fix=fix, code=2)
        axes[key] = values
    return axes


def split_outside_brackets(text: str) -> list[str]:
    """The parts of `text` between the commas that stand outside brackets and quotes."""
    parts = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        if letter == "," and not quote and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
