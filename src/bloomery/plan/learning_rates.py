"""The usual optimizer of each method: learning rate, weight decay and warmup, and the warning about a rate far outside.

What a recipe leaves at auto, what a generated recipe has, what is warned about and the tables of
docs/how-to/hyperparameters.md are these, with the facts about each objective and optimizer. Sources: the defaults of
TRL, and the packaged recipes; of rates of pretraining those of GPT-3, Llama 2 and Llama 3 (arXiv:2005.14165,
2307.09288, 2407.21783).
"""

from dataclasses import dataclass

from bloomery.core import Choice
from bloomery.core.units import Duration, parse_duration
from bloomery.facts.config import ModelConfig
from bloomery.facts.counting import parameter_count
from bloomery.facts.objectives import OBJECTIVES
from bloomery.facts.optimizers import OPTIMIZERS, USUAL_OPTIMIZER
from bloomery.facts.rates import Rates, rate_text
from bloomery.plan.vision import PROJECTOR_ALONE, TOWER
from bloomery.recipe.schema import Peft, Recipe

# Of models with fewer parameters than the first number of each row.
PRETRAINING = Rates(3e-4, 6e-4)
PRETRAINING_BY_SIZE = (
    (1e9, PRETRAINING),
    (2e10, Rates(1e-4, 3e-4)),
    (float("inf"), Rates(5e-5, 1.5e-4)),
)
FULL = Rates(1e-5, 2e-5)
LORA = Rates(1e-4, 2e-4)
ADALORA = LORA.times(2)
PEFT = Rates(1e-4, 2e-2, 1e-3)  # VeRA and (IA)3 train few parameters at high rates

WARMUP = "3%"  # of an adapter
WEIGHT_DECAY = 0.1  # of pretraining

FAR = 10  # times the usual range: beyond it the loss diverges, or does not move
# Models narrower than this take higher rates, in inverse proportion to their width (arXiv:2203.03466).
NARROW_WIDTH = 512
USUAL_WIDTH = 2048


@dataclass(frozen=True, kw_only=True)
class UsualOptimizer:
    """`method`: its name. `weight_decay` and `warmup`: as a recipe has them."""

    rates: Rates
    method: str
    weight_decay: float
    warmup: str


def usual_optimizer(
    objective: str,
    *,
    adapter: str,
    optimizer: str = USUAL_OPTIMIZER,
    new_parameters: float | None = None,
) -> UsualOptimizer:
    """The table's row of a method.

    `adapter`: none, lora, dora or the name of a PEFT method; `new_parameters`: the size of a model with random weights,
    None for a pretrained one.
    """
    adapted = adapter != "none"
    names = {"none": "full fine-tuning", "lora": "LoRA", "dora": "DoRA"}
    method = names.get(adapter, adapter)
    spec = OBJECTIVES[objective]
    if spec.rates is not None:
        rates = spec.rates.adapter if adapted else spec.rates.full
        method = f"{objective} with {method if adapter in names else 'an adapter'}"
    elif adapted:
        rates = {"lora": LORA, "dora": LORA, "adalora": ADALORA}.get(adapter, PEFT)
    elif new_parameters is not None:
        rates = next(rates for most, rates in PRETRAINING_BY_SIZE if new_parameters < most)
        method = "pretraining"
    else:
        rates = FULL
        method = "continued pretraining" if spec.reads_text else method
    # What was typed may be no optimizer, which is refused later.
    factor = OPTIMIZERS[optimizer].rate_factor if optimizer in OPTIMIZERS else 1.0
    return UsualOptimizer(
        rates=rates.times(factor),
        method=method if optimizer == USUAL_OPTIMIZER else f"{method} and {optimizer}",
        weight_decay=WEIGHT_DECAY if spec.reads_text and not adapted else 0.0,
        warmup=WARMUP if adapted and spec.reads_text else spec.warmup,
    )


def usual_of(recipe: Recipe, config: ModelConfig) -> UsualOptimizer:
    """The table's row of a recipe, whose model has this config."""
    adapter = recipe.adapter
    if recipe.vision.freeze_language_model:
        is_tower = recipe.vision.train == "tower"
        return UsualOptimizer(
            rates=TOWER if is_tower else PROJECTOR_ALONE,
            method="a tower alone" if is_tower else "a projector alone",
            weight_decay=0.0,
            warmup=WARMUP,
        )
    return usual_optimizer(
        recipe.objective.kind,
        adapter=adapter.method if isinstance(adapter, Peft) else adapter.kind,
        optimizer=recipe.optimizer.kind,
        new_parameters=parameter_count(config) if recipe.model.from_ is None else None,
    )


def with_usual_values(
    recipe: Recipe, config: ModelConfig
) -> tuple[Recipe, dict[str, Choice[float | str]]]:
    """The recipe with the table's values where its optimizer has "auto", and these choices by key."""
    usual = usual_of(recipe, config)
    section = recipe.optimizer
    new_model = recipe.model.from_ is None and recipe.adapter.kind == "none"
    values = dict[str, float | Duration]()
    choices = dict[str, Choice[float | str]]()
    if section.learning_rate == "auto":
        rate = usual.rates.start
        values["learning_rate"] = rate
        reason = f"usual for {usual.method}: {usual.rates}"
        choices["optimizer.learning_rate"] = Choice(rate_text(rate), reason)
        # Muon's matrices of a new model take more. Those of a pretrained one take what its other weights do.
        own_rate = OPTIMIZERS[section.kind].own_rate
        if own_rate is not None and getattr(section, own_rate.key) is None and new_model:
            matrix_rates = own_rate.of_new_model
            values[own_rate.key] = matrix_rates.low
            reason = f"{reason}; of the matrices {rate_text(matrix_rates.low)}: {matrix_rates}"
            choices["optimizer.learning_rate"] = Choice(rate_text(rate), reason)
    if section.weight_decay == "auto":
        values["weight_decay"] = usual.weight_decay
        reason = f"usual for {usual.method}"
        choices["optimizer.weight_decay"] = Choice(f"{usual.weight_decay:g}", reason)
    if section.warmup == "auto":
        duration = parse_duration(usual.warmup)
        values["warmup"] = duration
        reason = f"usual for {usual.method}"
        choices["optimizer.warmup"] = Choice(usual.warmup, reason)
    settled_section = section.model_copy(update=values)
    return recipe.model_copy(update={"optimizer": settled_section}), choices


def far_rates(recipe: Recipe, config: ModelConfig) -> list[str]:
    """A warning for each learning rate of the recipe far outside its usual range."""
    width = config.hidden_size
    usual = usual_of(recipe, config)
    checked_rates = list[tuple[str, float, Rates, str]]()
    if recipe.optimizer.learning_rate != "auto":
        rate = recipe.optimizer.learning_rate
        checked_rates.append(("learning_rate", rate, usual.rates, usual.method))
    kind = recipe.optimizer.kind
    own_rate = OPTIMIZERS[kind].own_rate
    matrix_rate = None if own_rate is None else getattr(recipe.optimizer, own_rate.key)
    if own_rate is not None and matrix_rate is not None:
        matrices = f"the matrices of {kind}"
        checked_rates.append((own_rate.key, matrix_rate, own_rate.of_new_model, matrices))
    highest = FAR * (USUAL_WIDTH / width if width < NARROW_WIDTH else 1)
    warnings = list[str]()
    for key, rate, usual_range, name in checked_rates:
        warning = (
            f"optimizer.{key} is {rate_text(rate)}, far {{}} the usual {usual_range} for {name}"
        )
        if rate > highest * usual_range.high:
            warnings.append(warning.format("above") + ": the loss may rise or become NaN")
        elif rate < usual_range.low / (10 * FAR):
            warnings.append(warning.format("below") + ": the model will hardly change")
    return warnings
