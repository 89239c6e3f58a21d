"""How parameters are trained, in the words of the recipe: optimizer states, adapter, quantization, average."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from hashlib import sha256
from typing import Any

from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.facts.optimizers import saves_memory
from bloomery.model.adapters.settings import ALL_LINEAR, adaptation, method_name, targets_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Lora, Peft, Recipe

# Options of PEFT's methods that set a rank; init_r is AdaLoRA's first and largest.
RANK_OPTIONS = ("init_r", "r", "rank")
DEFAULT_RANK = 8
DEFAULT_RANKS: Mapping[str, int] = {"ADALORA": 12}  # PEFT's AdaLoraConfig.init_r


@dataclass(frozen=True, kw_only=True)
class TrainingMode:
    """The training mode of parameters. The default: all trainable, optimizer states on the device."""

    state_dtype: str = "float32"
    offload: bool = False  # optimizer states are in CPU memory
    stochastic_rounding: bool = False
    fused_backward: bool = False  # a gradient is used and freed immediately
    # the adapter's modules and their ranks; none: full fine-tuning
    target_modules: tuple[tuple[str, int], ...] = ()
    modules_to_save: tuple[str, ...] = ()
    dora: bool = False
    pissa: bool = False
    dropout: bool = False
    peft: bool = False  # PEFT computes the adapter
    adapter_bytes: int = 4  # of a trainable adapter weight
    quantize_kind: str = "none"
    double_quant: bool = True
    ema: bool = False  # a second copy of the trainable parameters
    freezes_model: bool = False  # what reads pictures is trained alone

    @property
    def saves_optimizer_memory(self) -> bool:
        """Whether AdamW is the native one."""
        return saves_memory(self)

    @property
    def frozen(self) -> bool:
        """Whether the base weights are frozen."""
        return self.freezes_model or self.target_modules != ()


FULL = TrainingMode()


def mode_of(recipe: Recipe | RunPlan, config: ModelConfig) -> TrainingMode:
    """Raises UserError where an adapter's names match nothing."""
    optimizer = recipe.optimizer
    quantize = recipe.quantize
    mode = TrainingMode(
        state_dtype=optimizer.state_dtype,
        offload=optimizer.offload,
        stochastic_rounding=optimizer.stochastic_rounding,
        fused_backward=optimizer.fused_backward,
        quantize_kind=quantize.kind,
        double_quant=quantize.double_quant,
        ema=recipe.train.ema_decay is not None,
        freezes_model=recipe.vision.freeze_language_model,
    )
    adapter = recipe.adapter
    if isinstance(adapter, Peft):
        adapter = lora_like(adapter, config)
    if not isinstance(adapter, Lora):
        return mode
    adapted = adaptation(config, adapter)
    return replace(
        mode,
        peft=isinstance(recipe.adapter, Peft),
        target_modules=tuple((name, pair.rank) for name, pair in adapted.pairs.items()),
        modules_to_save=adapted.modules_to_save,
        dora=adapted.dora,
        pissa=adapted.pissa,
        dropout=adapted.dropout > 0,
        adapter_bytes=2 if adapted.dtype == "bfloat16" else 4,
    )


def lora_like(adapter: Peft, config: ModelConfig) -> Lora:
    """The LoRA with about the memory and time of a PEFT method: of its rank, on its modules."""
    options: dict[str, Any] = adapter.model_extra or {}
    default_rank = DEFAULT_RANKS.get(method_name(adapter.method), DEFAULT_RANK)
    ranks = (options.get(name) for name in RANK_OPTIONS)
    rank = next((rank for rank in ranks if isinstance(rank, int) and rank > 0), default_rank)
    targets = targets_of(adapter, config)
    lora = Lora(
        kind="lora",
        rank=rank,
        target_modules=[targets] if isinstance(targets, str) else list(targets),
    )
    try:
        adaptation(config, lora)
    except UserError:  # a regular expression of PEFT: at most every linear module
        return lora.model_copy(update={"target_modules": [ALL_LINEAR]})
    return lora


def setting_of(
    mode: TrainingMode,
    *,
    extra_forwards: int = 0,
    teacher: ModelConfig | None = None,
    teacher_quantize: str = "none",
    is_own_teacher: bool = False,
    teacher_streams: bool = False,
    teacher_place: str = "device",
    offload_activations: bool = False,
) -> str:
    """A short hash of the training mode, which a measurement of memory must share; empty: plain full fine-tuning."""
    if (mode, extra_forwards, teacher, offload_activations) == (FULL, 0, None, False):
        return ""
    # Only what differs from the default, so that a field that is added later keeps the hashes of today.
    changed_fields = {
        field.name: getattr(mode, field.name)
        for field in fields(mode)
        if getattr(mode, field.name) != field.default
    }
    text = repr((changed_fields, extra_forwards, teacher, offload_activations))
    text += "" if teacher_quantize == "none" else teacher_quantize
    text += "own teacher" if is_own_teacher else ""
    text += "streamed teacher" if teacher_streams else ""
    text += "" if teacher_place == "device" else f"teacher: {teacher_place}"
    return sha256(text.encode()).hexdigest()[:12]
