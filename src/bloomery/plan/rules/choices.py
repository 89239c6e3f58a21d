"""What a device and a recipe decide together: precision, attention, compiling, checkpointing."""

from collections.abc import Callable

from bloomery.core.choice import Choice
from bloomery.core.errors import UserError
from bloomery.data.chat.formats import wants_of
from bloomery.hardware.profile import Profile
from bloomery.model.attention import support as attention_facts
from bloomery.model.config import ModelConfig
from bloomery.plan.rules.backend import foreign_attention
from bloomery.recipe.schema import Peft, Recipe

ASKED = "the recipe asks for it"
COMPILE_SECONDS = 20.0  # for the blocks of a model on a CPU: 18 to 20
CPU_GAIN = 1.2  # of steps on a CPU, until this machine is measured: 1.1 to 1.35 in float32


def choose_precision(recipe: Recipe, profile: Profile) -> Choice[str]:
    asked = recipe.train.precision
    return profile.dtype if asked == "auto" else Choice(asked, ASKED)


def choose_attention(
    recipe: Recipe, config: ModelConfig, profile: Profile, *, precision: str, torch: str | None
) -> Choice[str]:
    """A backend of model.attention that does exactly what the recipe asks. Raises UserError when its own cannot."""
    windows = [window for window in config.sliding_window if window is not None]
    # Both answers of a pair stand in one row under every layout, and must not see each other.
    packed = recipe.data.layout == "packed" or wants_of(recipe) in ("pairs", "kto")
    kind = "cpu" if profile.accelerator is None else "cuda"
    asked = recipe.train.attention
    if config.foreign is not None:
        return foreign_attention(asked, config.foreign, packed=packed)

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
        because = choice.because if choice.value != "blockwise" else _because_unfused(unfit_for)
        return Choice(choice.value, _because_plain(profile, because))
    unfit = unfit_for(asked)
    if unfit is not None:
        raise UserError(
            f"train.attention {asked} cannot do what this recipe asks: {unfit}",
            where="train.attention",
            remedy="set train.attention=auto, or blockwise, which does everything",
            code=2,
        )
    return Choice(asked, ASKED)


def _because_unfused(unfit_for: Callable[[str], str | None]) -> str:
    """Why none of PyTorch's fused kernels does what is asked."""
    reasons = dict.fromkeys(reason for backend in ("varlen", "flex") if (reason := unfit_for(backend)))
    return "; ".join((*reasons, "blockwise does all, in memory that grows with the length alone"))


def _because_plain(profile: Profile, because: str) -> str:
    """The chip's own reason where it has no fused kernels, the backend's otherwise."""
    return profile.attention.because if profile.attention.value == "plain" else because


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
