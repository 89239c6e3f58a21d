"""Recipe edits that save memory, cheapest first, with what each saves."""

from collections.abc import Iterator
from dataclasses import replace

from bloomery.plan.batch import Cut, Measure
from bloomery.plan.types import Remedy
from bloomery.recipe.schema import Train
from bloomery.units import format_bytes


def remedies(cut: Cut, measure: Measure, train: Train) -> tuple[Remedy, ...]:
    """What helps a step that does not fit; nothing for one that does."""
    return () if cut.memory.fits else tuple(_remedies(cut, measure, train))


def _remedies(cut: Cut, measure: Measure, train: Train) -> Iterator[Remedy]:
    load, total = cut.load, cut.memory.total
    rows = load.micro_batch
    while rows % 2 == 0:
        rows //= 2
        smaller = measure(replace(load, micro_batch=rows))
        if smaller.fits or rows % 2:
            yield Remedy(edit=f"train.micro_batch={rows}", saves=_saved(total, smaller.total, "the same training"))
            break
    if load.checkpointing != "full":
        full = measure(replace(load, checkpointing="full"))
        edit = "train.activation_checkpointing=full"
        yield Remedy(edit=edit, saves=_saved(total, full.total, "a third more compute"))
    if load.optimizer == "adamw":
        factored = measure(replace(load, optimizer="adafactor"))
        yield Remedy(edit="optimizer.kind=adafactor", saves=_saved(total, factored.total, "another optimizer"))
    if train.precision == "float32":
        half = measure(replace(load, precision="bfloat16"))
        yield Remedy(edit="train.precision=auto", saves=_saved(total, half.total, "half-precision products"))


def _saved(before: float, after: float, cost: str) -> str:
    return f"{format_bytes(before - after)}: {format_bytes(after)} in all; {cost}"
