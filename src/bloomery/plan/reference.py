"""Where an objective takes the scores of the model of the start from. No torch."""

from typing import Literal

from bloomery.choice import Choice
from bloomery.recipe.schema import Adapter, Kto, Lora, Objective, Peft, Preference

Reference = Literal["none", "precomputed", "adapters"]


def reference_of(objective: Objective, adapter: Adapter) -> Choice[Reference]:
    """`precomputed`: once, before the first step. `adapters`: beside each step, from the base without its adapters."""
    if not isinstance(objective, Preference | Kto):
        return Choice("none", f"{objective.kind} compares with no other model")
    if isinstance(adapter, Peft):
        return Choice("precomputed", f"what the base is without {adapter.method} is not known here")
    if not isinstance(adapter, Lora):
        return Choice("precomputed", "training changes the weights that the reference is computed with")
    if adapter.train_also:
        return Choice("precomputed", f"{', '.join(adapter.train_also)} learn beside the adapters")
    return Choice("adapters", "the base without its adapters is the model of the start, at no memory of its own")
