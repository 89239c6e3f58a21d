"""What saves memory of the optimizer: what goes together with what, what each setting means here, and what does not."""

from collections.abc import Callable, Iterator

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.core.units import format_count
from bloomery.data.chat.formats import required_format_of
from bloomery.hardware.profile import Profile
from bloomery.model.attention import support as attention_facts
from bloomery.model.config import ModelConfig
from bloomery.model.counting import parameter_count
from bloomery.plan.estimate.states import (
    FULL,
    TrainingMode,
    adapter_bytes,
    held_bytes,
    largest,
    learning_bytes,
    mode_of,
    optimizer_bytes,
)
from bloomery.plan.rules.backend import transformers_attention
from bloomery.recipe.schema import Lora, OptimizerSection, Peft, Recipe

ASKED = "the recipe asks for it"
COMPILE_SECONDS = 20.0  # for the blocks of a model on a CPU: 18 to 20
CPU_GAIN = 1.2  # of steps on a CPU, until this machine is measured: 1.1 to 1.35 in float32


def choose_attention(
    recipe: Recipe, config: ModelConfig, profile: Profile, *, precision: str, torch: str | None
) -> Choice[str]:
    """A backend of model.attention that does exactly what the recipe asks. Raises UserError when its own cannot."""
    windows = [window for window in config.sliding_window if window is not None]
    # Both answers of a pair stand in one row under every layout, and must not see each other.
    packed = recipe.data.layout == "packed" or required_format_of(recipe) in ("pairs", "kto")
    kind = "cpu" if profile.accelerator is None else "cuda"
    asked = recipe.train.attention
    if config.transformers_backend is not None:
        return transformers_attention(asked, config.transformers_backend, packed=packed)

    def unfit_for(backend: str) -> str | None:
        return attention_facts.supports(
            backend,
            device_type=kind,
            packed=packed,
            window=any(window < recipe.data.sequence_length for window in windows),
            softcap=config.attention_softcap is not None,
            dropout=config.attention_dropout > 0,
            float32=precision == "float32",
            torch=torch,
        )

    if asked == "auto":
        choice = attention_facts.choose(
            kind,
            arch_has_fused=profile.attention.value == "fused",
            sequence_length=recipe.data.sequence_length,
            packed=packed,
            window=min(windows, default=None),
            softcap=config.attention_softcap,
            dropout=config.attention_dropout,
            float32=precision == "float32",
            torch=torch,
        )
        reason = choice.reason if choice.value != "blockwise" else _unfused_reason(unfit_for)
        return Choice(choice.value, _because_plain(profile, reason))
    unfit = unfit_for(asked)
    if unfit is not None:
        raise UserError(
            f"train.attention {asked} cannot do what this recipe asks: {unfit}",
            where="train.attention",
            fix="set train.attention=auto, or blockwise, which does everything",
            code=2,
        )
    return Choice(asked, ASKED)


def _unfused_reason(unfit_for: Callable[[str], str | None]) -> str:
    """Why none of PyTorch's fused kernels does what is asked."""
    reasons = dict.fromkeys(reason for backend in ("varlen", "flex") if (reason := unfit_for(backend)))
    return "; ".join((*reasons, "blockwise does all, in memory that grows with the length alone"))


def _because_plain(profile: Profile, reason: str) -> str:
    """The chip's own reason where it has no fused kernels, the backend's otherwise."""
    return profile.attention.reason if profile.attention.value == "plain" else reason


def choose_compile(
    recipe: Recipe, profile: Profile, seconds: float | None, *, gain: float | None = None
) -> Choice[bool]:
    """`seconds`: how long the run would train uncompiled; None when that is unknown.

    `gain`: how many times faster compiled steps of this model were on this device; None when nobody measured it.
    """
    asked = recipe.train.compile
    if asked != "auto":
        return Choice(asked, ASKED)
    if isinstance(recipe.adapter, Peft):
        return Choice(False, "PEFT's layers change while they train")
    if not profile.compile.value:
        return profile.compile
    if gain is not None:
        times = f"measured on this device: compiled steps take {1 / gain:.0%} of the time of uncompiled ones"
        saved = 0.0 if seconds is None else seconds * (1 - 1 / gain)
        return Choice(saved > COMPILE_SECONDS, times)
    if profile.accelerator is not None:
        return profile.compile
    if seconds is None or seconds * (1 - 1 / CPU_GAIN) <= COMPILE_SECONDS:
        return Choice(False, "compiling pays for itself after about two minutes of training")
    return profile.compile


def choose_deterministic(recipe: Recipe, profile: Profile) -> Choice[bool]:
    if profile.accelerator is None:
        return Choice(True, "the CPU's kernels repeat to the last bit")
    slower = "kernels that repeat to the last bit are slower"
    if recipe.train.deterministic == "auto":
        return Choice(False, f"{slower}; data order and states are exact either way")
    return Choice(recipe.train.deterministic, f"{ASKED}; {slower}" if recipe.train.deterministic else ASKED)


def optimizer_memory_choices(recipe: Recipe, *, accelerator: bool, precision: str) -> Iterator[tuple[str, Choice[str]]]:
    """By key, what is asked for and what it means in this run."""
    optimizer = recipe.optimizer
    if optimizer.state_dtype != "float32" and optimizer.kind == "adamw":
        yield "optimizer.state_dtype", Choice(f"{optimizer.state_dtype} states", _states(optimizer))
    if optimizer.fused_backward:
        yield "optimizer.fused_backward", Choice("optimizer in backward", _fused_backward(recipe))
    if optimizer.stochastic_rounding and _has_bfloat16(recipe, precision):
        reason = "bfloat16 weights are rounded at random, on average to what was computed"
        yield "optimizer.stochastic_rounding", Choice("stochastic rounding", reason)
    if (optimizer.paged or optimizer.offload) and accelerator and optimizer.kind == "adamw":
        reason = "states wait in pinned memory of the host and visit the GPU in pieces of 16 million numbers"
        yield "optimizer.offload", Choice("states on the host", reason)
    if recipe.train.offload_activations and accelerator:
        reason = "what layers keep for backward waits in pinned memory of the host"
        yield "train.offload_activations", Choice("activations on the host", reason)


def _states(optimizer: OptimizerSection) -> str:
    if optimizer.state_dtype == "int8":
        return "a byte for each number, and a scale for each 256; tensors under 4,096 numbers keep float32"
    return "rounded at random, so that averages do not stand still"


def _fused_backward(recipe: Recipe) -> str:
    freed = "each weight moves when its gradient stands, which is freed: nothing is accumulated"
    if recipe.optimizer.kind == "adafactor":
        return f"{freed}; gradients are not clipped, Adafactor clips its updates"
    if recipe.train.max_grad_norm is None:
        return freed
    limit = f"train.max_grad_norm={recipe.train.max_grad_norm:g}"
    return f"{freed}; {limit} holds for each gradient alone, not for their common norm"


def ineffective_settings(recipe: Recipe, *, accelerator: bool, precision: str) -> Iterator[str]:
    """What is asked for and changes nothing here, a sentence each."""
    optimizer = recipe.optimizer
    away = [f"optimizer.{key}" for key in ("paged", "offload") if getattr(optimizer, key)]
    if away and optimizer.kind == "adafactor":
        yield f"{away[0]} does nothing with Adafactor: its states are rows and columns, and stay where the weights are"
    elif away and not accelerator:
        yield f"{away[0]} does nothing on a CPU: states are in its memory anyway"
    if optimizer.state_dtype != "float32" and optimizer.kind == "adafactor":
        key = f"optimizer.state_dtype={optimizer.state_dtype}"
        yield f"{key} does nothing with Adafactor: its rows and columns stay float32"
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


def arithmetic_choices(recipe: Recipe, config: ModelConfig, *, precision: str) -> Iterator[tuple[str, Choice[str]]]:
    """By key, bytes of weights, gradients and states beside those of training everything."""
    if recipe.model.from_ is None:
        return

    def decimal(size: float) -> str:  # as this arithmetic is done everywhere
        return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

    whole = state_parts(config, FULL, "adamw", "bfloat16")
    each = {name: size / parameter_count(config) for name, size in whole.items()}
    rule = f"{sum(each.values()):.0f} bytes ({', '.join(f'{name} {size:.0f}' for name, size in each.items())})"
    held = state_parts(config, mode_of(recipe, config), recipe.optimizer.kind, precision)
    count, in_full = format_count(parameter_count(config)), decimal(sum(whole.values()))
    if held == whole:
        yield "model.from", Choice(f"{in_full} to train all", f"each of {count} parameters holds {rule}")
        return
    told = ", ".join(f"{name} {decimal(size)}" for name, size in held.items())
    reason = f"{told}; in full with AdamW each of {count} parameters holds {rule}"
    yield "model.from", Choice(f"{decimal(sum(held.values()))}, not {in_full}", reason)


def state_parts(config: ModelConfig, mode: TrainingMode, kind: str, precision: str) -> dict[str, float]:
    """Bytes that lie there whatever the text is. A gradient that is used in backward is the largest one alone."""
    learning = largest(config, mode, precision) if mode.fused_backward else learning_bytes(config, mode, precision)
    return {
        "weights": held_bytes(config, mode, precision) + adapter_bytes(config, mode),
        "gradients": learning,
        "states": optimizer_bytes(config, mode, kind, precision),
    }
