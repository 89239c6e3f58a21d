"""What saves memory of the optimizer: what goes together with what, what each setting means here, and what does not."""

from collections.abc import Iterator

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.recipe.schema import Lora, Optimizer, Recipe

KEYS = ("paged", "offload", "in_backward", "stochastic_rounding")


def refuse_lean_misfits(recipe: Recipe) -> None:
    """Raises UserError where an optimizer cannot do what is asked of it, or where a step would be cut in backward."""
    optimizer, train = recipe.optimizer, recipe.train
    asked = [f"optimizer.{key}" for key in KEYS if getattr(optimizer, key)]
    asked += [f"optimizer.states={optimizer.states}"] if optimizer.states != "float32" else []
    if optimizer.kind == "muon" and asked:
        raise UserError(
            f"{asked[0]} does not go with Muon, whose momentum stays in float32 on the device",
            where="optimizer.kind=muon",
            remedy=f"set optimizer.kind=adamw, or take {' and '.join(asked)} out of the recipe",
            code=2,
        )
    rows = train.micro_batch
    if not optimizer.in_backward or train.tokens_per_step == "auto" or rows == "auto":
        return
    assert isinstance(train.tokens_per_step, int)
    tokens = rows * recipe.data.sequence_length
    if train.tokens_per_step != tokens:
        raise UserError(
            f"optimizer.in_backward frees each gradient at once, so a step is one micro-batch: {tokens:,} tokens here,"
            f" not {train.tokens_per_step:,}",
            where="train.tokens_per_step",
            remedy=f"set train.tokens_per_step={tokens}, or optimizer.in_backward=false to accumulate",
            code=2,
        )


def lean_choices(recipe: Recipe, *, accelerator: bool, precision: str) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and what it means in this run."""
    optimizer = recipe.optimizer
    if optimizer.states != "float32" and optimizer.kind == "adamw":
        yield "optimizer.states", Choice(f"{optimizer.states} states", _states(optimizer))
    if optimizer.in_backward:
        yield "optimizer.in_backward", Choice("optimizer in backward", _in_backward(recipe))
    if optimizer.stochastic_rounding and _has_bfloat16(recipe, precision):
        because = "bfloat16 weights are rounded at random, on average to what was computed"
        yield "optimizer.stochastic_rounding", Choice("stochastic rounding", because)
    if (optimizer.paged or optimizer.offload) and accelerator and optimizer.kind == "adamw":
        because = "states wait in pinned memory of the host and visit the GPU in pieces of 16 million numbers"
        yield "optimizer.offload", Choice("states on the host", because)
    if recipe.train.offload_activations and accelerator:
        because = "what layers keep for backward waits in pinned memory of the host"
        yield "train.offload_activations", Choice("activations on the host", because)


def _states(optimizer: Optimizer) -> str:
    if optimizer.states == "int8":
        return "a byte for each number, and a scale for each 256; tensors under 4,096 numbers keep float32"
    return "rounded at random, so that averages do not stand still"


def _in_backward(recipe: Recipe) -> str:
    freed = "each weight moves when its gradient stands, which is freed: nothing is accumulated"
    if recipe.optimizer.kind == "adafactor":
        return f"{freed}; gradients are not clipped, Adafactor clips its updates"
    if recipe.train.clip is None:
        return freed
    return f"{freed}; train.clip={recipe.train.clip:g} holds for each gradient alone, not for their common norm"


def idle_lean_settings(recipe: Recipe, *, accelerator: bool, precision: str) -> Iterator[str]:
    """What is asked for and changes nothing here, a sentence each."""
    optimizer = recipe.optimizer
    away = [f"optimizer.{key}" for key in ("paged", "offload") if getattr(optimizer, key)]
    if away and optimizer.kind == "adafactor":
        yield f"{away[0]} does nothing with Adafactor: its states are rows and columns, and stay where the weights are"
    elif away and not accelerator:
        yield f"{away[0]} does nothing on a CPU: states are in its memory anyway"
    if optimizer.states != "float32" and optimizer.kind == "adafactor":
        yield f"optimizer.states={optimizer.states} does nothing with Adafactor: its rows and columns stay float32"
    if recipe.train.offload_activations and not accelerator:
        yield "train.offload_activations does nothing on a CPU: activations are in its memory anyway"
    elif recipe.train.offload_activations and recipe.train.activation_checkpointing == "selective":
        yield "train.offload_activations leaves what selective checkpointing keeps on the GPU: full goes with it"
    if optimizer.stochastic_rounding and not _has_bfloat16(recipe, precision):
        remark = "weights that learn are float32 here; train.precision=bfloat16-pure makes them bfloat16"
        yield f"optimizer.stochastic_rounding does nothing: {remark}"


def _has_bfloat16(recipe: Recipe, precision: str) -> bool:
    """Whether weights that learn are bfloat16."""
    adapter = recipe.adapter
    return precision == "bfloat16-pure" or (isinstance(adapter, Lora) and adapter.dtype == "bfloat16")
