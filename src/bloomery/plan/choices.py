"""What a device and a recipe decide together: precision, attention, compiling, checkpointing."""

from bloomery.choice import Choice
from bloomery.hardware.profile import Profile
from bloomery.model.config import ModelConfig
from bloomery.recipe.schema import Recipe

ASKED = "the recipe asks for it"
PAYS_BACK_SECONDS = 120.0  # compiling blocks on a CPU takes 18 to 20 s and a training step is a sixth to a third faster
MASK_LENGTH = 512  # up to here one boolean mask is faster on a CPU than a call for each document


def choose_precision(recipe: Recipe, profile: Profile) -> Choice[str]:
    asked = recipe.train.precision
    return profile.dtype if asked == "auto" else Choice(asked, ASKED)


def precision_warning(recipe: Recipe, profile: Profile) -> str | None:
    """Why a precision that the recipe insists on is a bad idea on this device."""
    asked = recipe.train.precision
    if asked == "float16" and profile.accelerator is None:
        return "train.precision is float16, and a CPU multiplies that five to nine times slower than float32"
    arch = profile.arch
    if asked.startswith("bfloat16") and arch is not None and not arch.bf16_matmul:
        return f"train.precision is {asked}, and {arch.names[0]} only emulates bf16: as slow as float32"
    return None


def choose_attention(recipe: Recipe, config: ModelConfig, profile: Profile) -> Choice[str]:
    """A backend of model.attention for this device, layout and length."""
    asked = recipe.train.attention
    if asked != "auto":
        return Choice(asked, ASKED)
    packed = recipe.data.layout == "packed"
    if config.attention_softcap is not None:
        return Choice("blockwise", "soft-capped scores, and PyTorch's kernels have no soft-cap")
    if profile.attention.value == "plain":
        return Choice("blockwise", profile.attention.because)
    if not packed:
        return Choice("sdpa", profile.attention.because)
    if profile.accelerator is not None:
        return Choice("varlen", f"{profile.attention.because}, and they keep packed documents apart")
    if recipe.data.sequence_length <= MASK_LENGTH:
        return Choice("mask", f"rows of up to {MASK_LENGTH} tokens: one mask keeps packed documents apart fastest")
    return Choice("per_document", "one kernel call for each packed document skips what it must not see")


def choose_compile(recipe: Recipe, profile: Profile, seconds: float | None) -> Choice[bool]:
    """`seconds`: how long the run would train uncompiled; None when that is unknown."""
    asked = recipe.train.compile
    if asked != "auto":
        return Choice(asked, ASKED)
    if not profile.compile.value or profile.accelerator is not None:
        return profile.compile
    if seconds is None or seconds <= PAYS_BACK_SECONDS:
        return Choice(False, "compiling pays for itself after about two minutes of training")
    return profile.compile


def choose_deterministic(recipe: Recipe, profile: Profile) -> Choice[bool]:
    if profile.accelerator is None:
        return Choice(True, "the CPU's kernels repeat to the last bit")
    if recipe.train.deterministic == "auto":
        return Choice(
            False, "kernels that repeat to the last bit are slower; data order and states are exact either way"
        )
    return Choice(recipe.train.deterministic, ASKED)
