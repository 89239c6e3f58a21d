"""Usual learning rates by method, objective and optimizer, and the warning about one far outside.

docs/how-to/hyperparameters.md shows these tables. Sources: the papers of each objective, the defaults of TRL, and the
packaged recipes; for Adafactor its update relative to the weights (arXiv:1804.04235), for Muon arXiv:2502.16982.
"""

from dataclasses import dataclass

from bloomery.recipe.schema import Peft, Recipe


@dataclass(frozen=True)
class Rates:
    """The usual range of a learning rate."""

    low: float
    high: float

    def times(self, factor: float) -> "Rates":
        return Rates(self.low * factor, self.high * factor)

    def __str__(self) -> str:
        return f"{short(self.low)} to {short(self.high)}"


PRETRAINING = Rates(3e-4, 6e-4)
FULL = Rates(1e-5, 2e-5)
LORA = Rates(1e-4, 2e-4)
PEFT = Rates(1e-4, 2e-2)  # of the other methods; VeRA and (IA)3 train few parameters at high rates
PREFERENCES = {  # objective: with an adapter, full fine-tuning
    "dpo": (Rates(5e-6, 5e-5), Rates(5e-7, 5e-6)),
    "ipo": (Rates(5e-6, 5e-5), Rates(5e-7, 5e-6)),
    "kto": (Rates(5e-6, 5e-5), Rates(5e-7, 5e-6)),
    "orpo": (Rates(1e-5, 5e-5), Rates(5e-6, 8e-6)),
    "simpo": (Rates(5e-6, 2e-5), Rates(3e-7, 1e-6)),
    "reward": (Rates(1e-5, 5e-5), Rates(1e-6, 1e-5)),
}
# Of another optimizer than AdamW, relative to AdamW's rate. Muon's `learning_rate` is that of its AdamW.
OF_OPTIMIZERS = {"adamw": 1.0, "muon": 1.0, "adafactor": 25.0}
MUON = Rates(2e-3, 5e-2)  # optimizer.muon_learning_rate, of the matrices

FAR = 10  # times the usual range: beyond it the loss diverges, or does not move
# Narrow models take higher rates (arXiv:2203.03466): those below this width, up to six times as high again.
NARROW_WIDTH = 512
NARROW = 6


def usual_rates(recipe: Recipe) -> tuple[Rates, str]:
    """The usual range of `optimizer.learning_rate`, and the name of the method."""
    optimizer = recipe.optimizer.kind
    factor = OF_OPTIMIZERS.get(optimizer, 1.0)
    adapted = recipe.adapter.kind != "none"
    method = {"none": "full fine-tuning", "lora": "LoRA", "dora": "DoRA"}.get(
        recipe.adapter.kind, "an adapter"
    )
    if recipe.objective.kind in PREFERENCES:
        rates = PREFERENCES[recipe.objective.kind][0 if adapted else 1]
        method = f"{recipe.objective.kind} with {method}"
    elif isinstance(recipe.adapter, Peft):
        rates = PEFT
        method = recipe.adapter.method
    elif adapted:
        rates = LORA
    elif recipe.model.from_ is None:
        rates = PRETRAINING
        method = "pretraining"
    else:
        rates = FULL
    return rates.times(factor), method if optimizer == "adamw" else f"{method} and {optimizer}"


def far_rates(recipe: Recipe, *, width: int) -> list[str]:
    """A warning for each learning rate far outside its usual range. `width`: of the model's hidden states."""
    rates, method = usual_rates(recipe)
    checked_rates = [("learning_rate", recipe.optimizer.learning_rate, rates, method)]
    if recipe.optimizer.kind == "muon" and recipe.optimizer.muon_learning_rate is not None:
        checked_rates.append(
            (
                "muon_learning_rate",
                recipe.optimizer.muon_learning_rate,
                MUON,
                "the matrices of muon",
            )
        )
    highest = FAR * (NARROW if width < NARROW_WIDTH else 1)
    warnings = list[str]()
    for key, rate, usual_range, name in checked_rates:
        warning = f"optimizer.{key} is {short(rate)}, far {{}} the usual {usual_range} for {name}"
        if rate > highest * usual_range.high:
            warnings.append(warning.format("above") + ": the loss may rise or become NaN")
        elif rate < usual_range.low / (10 * FAR):
            warnings.append(warning.format("below") + ": the model will hardly change")
    return warnings


def short(rate: float) -> str:
    """0.0002 -> "2e-4"; from 0.01 on as it is."""
    if rate >= 0.01:
        return f"{rate:g}"
    digits, _, exponent = f"{rate:.3e}".partition("e")
    return f"{float(digits):g}e{int(exponent)}"
