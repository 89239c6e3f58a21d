"""Choices of attention, compilation, determinism and optimizer memory, with their reasons.

Also for the transformers implementation, with the settings that it does not support, and for the parts of an
objective: teacher, reference model, share of loss tokens.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal, TypeVar

from bloomery.core import Choice
from bloomery.core.device import can
from bloomery.core.errors import UserError
from bloomery.core.units import format_bytes, format_count, format_seconds
from bloomery.data.tokenizer.templates import NONE
from bloomery.facts import attention as attention_facts
from bloomery.facts.config import ModelConfig, TransformersBackend
from bloomery.facts.counting import head_widths, layers, parameter_count, smallest_window
from bloomery.facts.families import architecture_of
from bloomery.facts.optimizers import OPTIMIZERS
from bloomery.hardware.machine import CpuCheck
from bloomery.hardware.profile import Profile
from bloomery.model.attention import tiles
from bloomery.model.configs import known_config
from bloomery.plan.estimate.kernels import kernel_runs
from bloomery.plan.estimate.mode import mode_of, setting_of
from bloomery.plan.estimate.states import TrainedModel
from bloomery.plan.estimate.step import ReferencePlace, StepPictures, TeacherPlace
from bloomery.plan.estimate.towers import TrainedTower
from bloomery.plan.types import DatasetFacts, RunPlan
from bloomery.recipe.objectives import (
    GroupRollouts,
    Grpo,
    Ppo,
    RewardedRollouts,
    Rloo,
    Rollouts,
    TaughtByDivergence,
)
from bloomery.recipe.schema import (
    Adapter,
    AnyObjective,
    Lora,
    Peft,
    Recipe,
    Train,
    VisionParts,
)

# of flash attention 2 (its README), which varlen_attn calls; wider heads are an error in the first step
WIDEST_FLASH_HEAD = 256

T = TypeVar("T")


def set_or(planned: Choice[T], recipe_value: T | Literal["auto"]) -> Choice[T]:
    """The recipe's own value, else the planned one."""
    return planned if recipe_value == "auto" else Choice(recipe_value, ASKED)


def refuse_transformers_misfits(recipe: Recipe, config: ModelConfig) -> None:
    """Raises UserError for settings that the transformers implementation does not support."""
    if config.transformers_backend is None:
        return
    key = "model.implementation=transformers"
    problem = None
    fix = None
    names = (
        stored_name
        for native_name, stored_name, _ in config.transformers_backend.parameters
        if native_name == "lm_head.weight"
    )
    head_name = next(names, "lm_head.weight")
    head = isinstance(recipe.adapter, Lora) and any(
        "lm_head" in name for name in recipe.adapter.modules_to_save
    )
    if recipe.objective.spec.values:
        problem = f"reward models need the native implementation, which does not support {architecture_of(config)}"
        key = f"objective.kind={recipe.objective.kind}"
        fix = "choose a model family of docs/reference/models.md"
    elif recipe.model.dropout is not None:
        problem = "the transformers implementation takes dropout from config.json"
        key = "model.dropout"
        fix = "remove it, or set dropout in the model's config.json"
    elif head and head_name != "lm_head.weight":
        problem = "the head of this architecture has another name in its files: PEFT cannot load it"
        key = "adapter.modules_to_save"
        fix = "remove lm_head, or set adapter.kind=none to train all parameters"
    elif isinstance(recipe.adapter, Peft) and (recipe.adapter.model_extra or {}).get(
        "modules_to_save"
    ):
        problem = "modules_to_save is not supported for PEFT methods on this architecture"
        key = "adapter.modules_to_save"
        fix = "remove it, or set adapter.kind=lora adapter.modules_to_save=[...]"
    elif recipe.train.compile is True:
        problem = "compilation is not supported for the transformers implementation"
        key = "train.compile"
        fix = "set train.compile=auto"
    if problem is not None and fix is not None:
        raise UserError(problem, where=key, fix=fix, code=2)


def transformers_attention(
    backend: str, transformers_backend: TransformersBackend, *, packed: bool
) -> Choice[str]:
    """The backend with the memory and time of transformers' attention. Raises UserError for any other."""
    layer_attention = (
        "math" if transformers_backend.attention == "eager" else "mask" if packed else "sdpa"
    )
    if backend not in ("auto", layer_attention):
        problem = f"the transformers implementation does not support this attention: {backend}"
        raise UserError(problem, where="train.attention", fix="set train.attention=auto", code=2)
    reason = {
        "math": "transformers computes every attention score of this architecture (eager)",
        "mask": "PyTorch's kernel with a document mask, as transformers calls it"
        if transformers_backend.documents != "rows"
        else "PyTorch's kernel as transformers calls it: each document is a row of its own",
        "sdpa": "PyTorch's kernel as transformers calls it: one document per sequence",
    }[layer_attention]
    return Choice(layer_attention, reason)


def transformers_choices(recipe: Recipe, config: ModelConfig) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the implementation, and how weights are loaded."""
    if config.transformers_backend is None:
        if recipe.model.load_with == "transformers":
            reason = "the native implementation refuses a file that lacks a tensor"
            yield "model.load_with", Choice("safe load", reason)
        return
    origin = f"no native implementation of {architecture_of(config)}"
    if recipe.model.implementation == "transformers":
        origin = "set in the recipe"
    lacks = "no tensor, pipeline or context parallelism"
    yield "model.implementation", Choice("transformers", f"{origin}; {lacks}")
    if experts := config.transformers_backend.experts:
        reason = f"transformers' layers report no load of their {experts} experts to a loss"
        yield "router.loss", Choice("no balance loss", reason)
    if recipe.data.layout == "packed" and config.transformers_backend.documents == "rows":
        reason = f"transformers' layers do not keep documents apart: {config.transformers_backend.documents_reason}"
        yield "data.packing", Choice("a row for each document", reason)
    if reason := config.transformers_backend.safe_reason:
        yield "model.load_with", Choice("safe load", f"transformers loads the weights, as {reason}")


ASKED = "set in the recipe"
# to compile the blocks of a model on two quiet cores of an AMD EPYC, caches cold: 18 to 29
COMPILE_SECONDS = 29.0
RECOMPILE_SECONDS = 9.0  # of a resumed process there, caches warm
COMPILE_PYTHON_SECONDS = 6e-4  # of the check's loop on a core of its kind
CPU_GAIN = 1.15  # of steps on a CPU, until this machine is measured: 1.03 to 1.35


# Of the backend `triton`, wherever it was chosen.
NOT_RUN = "not yet run on this card"


def choose_attention(
    recipe: Recipe, config: ModelConfig, profile: Profile, *, precision: str, torch: str | None
) -> Choice[str]:
    """A backend of model.attention that supports the recipe. Raises UserError when the recipe's own does not."""
    # Both responses of a pair share a sequence in every layout, with document masking.
    packed = recipe.data.layout == "packed" or recipe.objective.spec.data_kind in ("pairs", "kto")
    kind = profile.device.value
    requested = recipe.train.attention
    absent = _absent_attention(profile, config, precision)
    if config.transformers_backend is not None:
        return transformers_attention(requested, config.transformers_backend, packed=packed)

    window = smallest_window(config)

    def unfit_for(backend: str) -> str | None:
        return attention_facts.missing_feature(
            backend,
            device_type=kind,
            packed=packed,
            window=window is not None and window < recipe.data.sequence_length,
            softcap=config.attention_softcap is not None,
            dropout=config.attention_dropout > 0,
            sinks=config.attention_sinks,
            float32=precision == "float32",
            torch=torch,
        )

    if can(kind, "triton") and "triton" not in absent:
        length = recipe.data.sequence_length
        refusal = _triton_refusal(
            config, profile, precision=precision, length=length, is_set=requested != "auto"
        )
        if refusal is not None:
            absent["triton"] = refusal

    if requested == "auto":
        choice = attention_facts.choose_backend(
            kind,
            arch_has_fused=profile.attention.value == "fused",
            sequence_length=recipe.data.sequence_length,
            packed=packed,
            window=smallest_window(config),
            softcap=config.attention_softcap,
            dropout=config.attention_dropout,
            sinks=config.attention_sinks,
            float32=precision == "float32",
            torch=torch,
            absent=absent,
            compiled=compiled_attention(profile, precision),
        )
        if kind == "cpu" or choice.value not in ("triton", "blockwise"):
            return choice

        # Why no fused kernel of PyTorch serves the recipe, and before blockwise why no kernel of Triton does.
        reasons = [profile.attention.reason]
        if profile.attention.value == "fused":
            refusals = (absent.get(kernel) or unfit_for(kernel) for kernel in ("varlen", "flex"))
            reasons = [refusal for refusal in refusals if refusal]
        if choice.value == "triton":
            reasons.append(f"{choice.reason}, {NOT_RUN}")
        else:
            refusal = absent.get("triton") or unfit_for("triton")
            if refusal is not None and not any(refusal in reason for reason in reasons):
                reasons.append(refusal)
        if choice.value == "blockwise" and profile.attention.value == "fused":
            reasons.append("blockwise supports this recipe, with memory linear in the length")
        return Choice(choice.value, "; ".join(dict.fromkeys(reasons)))

    # flex may compile all the same. Of a GPU that is only planned for, the owner may have another PyTorch than the
    # recommended one, and with it another Triton.
    unfit = unfit_for(requested) or (absent.get(requested) if requested != "flex" else None)
    triton = profile.triton_compiles
    is_open = requested == "triton" and triton.value == "another" and unfit == triton.reason
    if unfit is not None and not is_open:
        raise UserError(
            f"train.attention={requested} does not support this recipe: {unfit}",
            where="train.attention",
            fix="set train.attention=auto, or blockwise, which supports everything",
            code=2,
        )
    reasons = [ASKED, *([triton.reason] if is_open else [])]
    return Choice(requested, "; ".join([*reasons, NOT_RUN] if requested == "triton" else reasons))


def decodes_with_kernel(
    config: ModelConfig, profile: Profile, *, precision: str, torch: str
) -> bool:
    """Whether `auto` would train the model with the Triton kernels on this GPU, on one document per sequence.

    Then its new tokens are decoded with their kernel, too: the one condition is as strict as the other.
    """
    if profile.accelerator is None or config.transformers_backend is not None:
        return False
    absent = _absent_attention(profile, config, precision)
    length = config.max_positions
    refusal = _triton_refusal(config, profile, precision=precision, length=length, is_set=False)
    if refusal is not None:
        absent.setdefault("triton", refusal)
    choice = attention_facts.choose_backend(
        profile.device.value,
        arch_has_fused=profile.attention.value == "fused",
        sequence_length=length,
        packed=False,
        window=smallest_window(config),
        softcap=config.attention_softcap,
        dropout=0.0,
        sinks=config.attention_sinks,
        float32=precision == "float32",
        torch=torch,
        absent=absent,
    )
    return choice.value == "triton"


def _triton_refusal(
    config: ModelConfig, profile: Profile, *, precision: str, length: int, is_set: bool
) -> str | None:
    """What the compiled kernels say against the Triton backend. `is_set`: by the recipe."""
    for run in kernel_runs(config, profile, precision=precision, length=length):
        refusal = tiles.refusal(run)
        if refusal is None and not is_set:
            refusal = tiles.reason_against(run)
        if refusal is not None:
            return refusal
    return None


def _absent_attention(profile: Profile, config: ModelConfig, precision: str) -> dict[str, str]:
    """Backends without a kernel for the GPU in this precision, or for heads this wide, with the reason."""
    arch = profile.arch
    absent = {} if arch is None else arch.absent_attention()
    if max(head_widths(config), default=0) > WIDEST_FLASH_HEAD:
        widest = f"flash attention takes heads of at most {WIDEST_FLASH_HEAD} numbers"
        absent.setdefault("varlen", widest)
    if profile.triton is None:
        absent.setdefault("flex", "FlexAttention is compiled by Triton, which is not installed")
    if profile.triton_compiles.value != "yes":
        absent["triton"] = profile.triton_compiles.reason
    elif arch is not None and precision.startswith("bfloat16") and arch.bf16 == "none":
        absent["triton"] = (
            f"{arch.names[0]} has no bfloat16 instruction: set train.precision=float16"
        )
    return absent


def compiled_attention(profile: Profile, precision: str) -> str | None:
    """Why `model.attention.compiled` is the quickest on this CPU; None: it is not, or is not there."""
    widened = precision == "bfloat16" and not (profile.cpu is not None and profile.cpu.bf16)
    if (
        not profile.native.value
        or precision not in ("float32", "bfloat16", "bfloat16-pure")
        or widened
    ):
        return None
    return f"{profile.native.reason}: no work on masked keys, backward in a third of the time of torch's kernel"


def choose_compile(
    recipe: Recipe,
    profile: Profile,
    seconds: float | None,
    *,
    gain: float | None = None,
    check: CpuCheck | None = None,
    config: ModelConfig | None = None,
) -> Choice[bool]:
    """Compiled where the run then ends first, compiling and one resume included.

    `seconds`: of the run uncompiled; None when unknown. `gain`: uncompiled over compiled step time of this model on
    this device; None when not measured. `check`: of this CPU, by which the time to compile is scaled.
    """
    setting = recipe.train.compile
    if setting != "auto":
        return Choice(setting, ASKED)
    if isinstance(recipe.adapter, Peft):
        return Choice(False, "PEFT layers change during training")
    if config is not None and any(layer.delta_net is not None for layer in layers(config)):
        return Choice(False, "a delta net computes between graphs, which nobody has measured")
    if recipe.parallel.expert > 1:
        return Choice(
            False, "devices divide the experts, and exchange other numbers of rows in each step"
        )
    if not profile.compile.value:
        return profile.compile
    if gain is not None:
        times = (
            f"measured on this device: compiled steps take {1 / gain:.0%} of the uncompiled time"
        )
        saved = 0.0 if seconds is None else seconds * (1 - 1 / gain)
        return Choice(saved > compile_seconds(check), times)
    if profile.accelerator is not None:
        return profile.compile
    compiling = compile_seconds(check)
    if seconds is None or seconds * (1 - 1 / CPU_GAIN) <= compiling:
        pays = format_seconds(compiling / (1 - 1 / CPU_GAIN))
        return Choice(
            False,
            f"compiling takes {compiling:.0f} s with one resume, and pays off after {pays} of training",
        )
    return profile.compile


def compile_seconds(check: CpuCheck | None) -> float:
    """To compile the blocks of a model on a CPU at the start and after a resume."""
    slower = 1.0 if check is None else check.python_seconds / COMPILE_PYTHON_SECONDS
    return (COMPILE_SECONDS + RECOMPILE_SECONDS) * slower


def choose_deterministic(recipe: Recipe, profile: Profile) -> Choice[bool]:
    """Always on a CPU, which has no other kernels; on a GPU when the recipe asks for it."""
    if profile.accelerator is None:
        return Choice(True, "CPU kernels are bitwise deterministic")
    slower = "deterministic kernels are slower"
    if recipe.train.deterministic == "auto":
        return Choice(False, f"{slower}; data order and states are exact without them")
    return Choice(
        recipe.train.deterministic, f"{ASKED}; {slower}" if recipe.train.deterministic else ASKED
    )


def choose_fused(recipe: Recipe, profile: Profile, model: TrainedModel) -> Choice[bool]:
    """Whether torch's fused AdamW does the update; memory-saving states need Bloomery's own."""
    spec = OPTIMIZERS[recipe.optimizer.kind]
    if spec.always_native or model.mode.saves_optimizer_memory:
        return Choice(False, f"Bloomery's {spec.name}, in float32 pieces of bounded size")
    return profile.fused_optimizer


def optimizer_memory_choices(
    recipe: Recipe, *, accelerator: bool, precision: str
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: settings that save memory, and their effect in this run."""
    optimizer = recipe.optimizer
    spec = OPTIMIZERS[recipe.optimizer.kind]
    if optimizer.state_dtype != "float32" and "state_dtype" in spec.settings:
        reason = "stochastic rounding, so that small updates are not lost"
        if optimizer.state_dtype == "int8":
            reason = "one byte per value, and a scale for each 256; tensors under 4,096 values keep float32"
        yield "optimizer.state_dtype", Choice(f"{optimizer.state_dtype} states", reason)
    if optimizer.fused_backward:
        reason = "each weight is updated as soon as its gradient exists, which is then freed: no gradient accumulation"
        if spec.clips_updates:
            reason += f"; no gradient clipping, {spec.name} clips its updates"
        elif recipe.train.max_grad_norm is not None:
            limit = f"train.max_grad_norm={recipe.train.max_grad_norm:g}"
            reason += f"; {limit} limits each gradient alone, not the global norm"
        yield "optimizer.fused_backward", Choice("fused backward", reason)
    if optimizer.stochastic_rounding and _has_bfloat16(recipe, precision):
        reason = "bfloat16 weights are rounded at random, without bias on average"
        yield "optimizer.stochastic_rounding", Choice("stochastic rounding", reason)
    if optimizer.offload and accelerator and "offload" in spec.settings:
        reason = "states in pinned CPU memory, copied to the GPU in pieces of 16 million values"
        yield "optimizer.offload", Choice("offloaded states", reason)
    if recipe.train.offload_activations and accelerator:
        reason = "activations wait for backward in pinned CPU memory"
        yield "train.offload_activations", Choice("offloaded activations", reason)


def ineffective_settings(recipe: Recipe, *, accelerator: bool, precision: str) -> Iterator[str]:
    """Warnings about settings without effect in this run."""
    optimizer = recipe.optimizer
    spec = OPTIMIZERS[recipe.optimizer.kind]
    offload = "optimizer.paged" if optimizer.paged else "optimizer.offload"
    if optimizer.offload and "offload" in spec.ineffective_settings:
        yield f"{offload} has no effect with {spec.name}: {spec.ineffective_settings['offload']}"
    elif optimizer.offload and not accelerator:
        yield f"{offload} has no effect on a CPU: states are already in CPU memory"
    if optimizer.state_dtype != "float32" and "state_dtype" in spec.ineffective_settings:
        key = f"optimizer.state_dtype={optimizer.state_dtype}"
        yield f"{key} has no effect with {spec.name}: {spec.ineffective_settings['state_dtype']}"
    if recipe.train.offload_activations and not accelerator:
        yield "train.offload_activations has no effect on a CPU: activations are already in CPU memory"
    elif recipe.train.offload_activations and recipe.train.activation_checkpointing == "selective":
        yield "train.offload_activations does not offload what selective checkpointing keeps: use full"
    if isinstance(recipe.objective, RewardedRollouts) and recipe.objective.reference != "auto":
        key = f"objective.reference={recipe.objective.reference}"
        if reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value != "copy":
            yield f"{key} has no effect: the run needs no frozen copy of the start"
        elif recipe.objective.reference == "host" and not accelerator:
            yield f"{key} has no effect on a CPU: the copy is already in CPU memory"
    if isinstance(recipe.objective, GroupRollouts) and recipe.objective.teacher is None:
        for name in sorted(TEACHER_KEYS & recipe.objective.model_fields_set):
            yield f"objective.{name} has no effect: objective.teacher is unset"
    if isinstance(recipe.objective, TaughtByDivergence):
        taught = recipe.objective
        has_own_prompts = (
            taught.teacher_prompt_template is not None or taught.estimator == "sampled"
        )
        if taught.teacher_template_kwargs and not has_own_prompts:
            yield (
                "objective.teacher_template_kwargs has no effect: the teacher has the tokenizer and the prompts of the"
                " model"
            )
    if recipe.objective.stored_scores is not None:
        for name in sorted(
            {"teacher_quantize", "teacher_stream"} & recipe.objective.model_fields_set
        ):
            yield f"objective.{name} has no effect with objective.teacher_scores: no teacher is loaded"
    own = recipe.objective.own_teacher
    if own is not None:
        for name in sorted(
            {"teacher_quantize", "teacher_stream"} & recipe.objective.model_fields_set
        ):
            yield f"objective.{name} has no effect with objective.teacher={own}: its weights are the model's own"
    if teacher_streams(recipe) and not accelerator:
        yield "objective.teacher_stream has no effect on a CPU: the teacher is already in CPU memory"
    if optimizer.stochastic_rounding and not _has_bfloat16(recipe, precision):
        remark = (
            "trainable parameters are float32; train.precision=bfloat16-pure makes them bfloat16"
        )
        yield f"optimizer.stochastic_rounding has no effect: {remark}"


def _has_bfloat16(recipe: Recipe, precision: str) -> bool:
    """Whether trainable parameters are bfloat16."""
    adapter = recipe.adapter
    return precision == "bfloat16-pure" or (
        isinstance(adapter, Lora) and adapter.dtype == "bfloat16"
    )


def arithmetic_choices(
    recipe: Recipe, model: TrainedModel, *, precision: str, pictures: StepPictures | None = None
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: bytes of weights, gradients and states, compared with full fine-tuning."""
    if recipe.model.from_ is None:
        return

    def decimal(size: float) -> str:  # decimal, as in papers
        return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"

    numbers = parameter_count(model.config)
    full_parts = TrainedModel(model.config).state_parts("adamw", "bfloat16")
    bytes_each = ", ".join(f"{name} {size / numbers:.0f}" for name, size in full_parts.items())
    state_parts = model.state_parts(recipe.optimizer.kind, precision)
    tower = None if pictures is None else TrainedTower(pictures, model, precision)
    if tower is not None and tower.numbers:
        state_parts["weights"] += tower.bytes
        state_parts["gradients"] += tower.bytes
        state_parts["states"] += tower.state_bytes(recipe.optimizer.kind)
    in_full = decimal(sum(full_parts.values()))
    bytes_in_all = sum(size / numbers for size in full_parts.values())
    rule = f"{bytes_in_all:.0f} bytes ({bytes_each}) for each of {format_count(numbers)}"
    if state_parts == full_parts:
        yield "model.from", Choice(f"training state {in_full}", f"full training: {rule} parameters")
        return
    sizes = ", ".join(f"{name} {decimal(size)}" for name, size in state_parts.items())
    if tower is not None and tower.numbers:
        sizes += f", with {format_count(tower.numbers)} parameters that read pictures"
    reason = f"{sizes}; full training with AdamW: {rule} parameters"
    yield (
        "model.from",
        Choice(
            f"training state {decimal(sum(state_parts.values()))}",
            f"instead of {in_full}: {reason}",
        ),
    )


Reference = Literal["none", "precomputed", "adapters", "copy"]


_BASE_IS_REFERENCE = (
    "the base model without its adapters is the reference model, without extra memory"
)


def reference_of(
    objective: AnyObjective, adapter: Adapter, vision: VisionParts
) -> Choice[Reference]:
    """`precomputed`: before the first step. `adapters`: in each step, by the base model without its adapters. `copy`:
    by a frozen copy of the start, for completions that no dataset has.

    `vision`: what is trained in full of the parts that read pictures.
    """
    beside = [*adapter.modules_to_save] if isinstance(adapter, Lora) else []
    if vision != "none":
        beside.append(f"vision.train={vision}")
    if isinstance(objective, RewardedRollouts) and objective.kl_weight:
        if isinstance(adapter, Lora) and not beside:
            return Choice("adapters", _BASE_IS_REFERENCE)
        return Choice("copy", "training changes the weights of the reference model")
    if not objective.spec.reference:
        return Choice("none", f"{objective.kind} has no reference model")
    if isinstance(adapter, Peft):
        return Choice(
            "precomputed", f"the base model without {adapter.method} is not available in a step"
        )
    if not isinstance(adapter, Lora):
        return Choice("precomputed", "training changes the weights of the reference model")
    if beside:
        return Choice("precomputed", f"{', '.join(beside)} are trainable, not only adapters")
    return Choice("adapters", _BASE_IS_REFERENCE)


def correction_of(objective: Grpo) -> Choice[bool]:
    """Whether the loss corrects for probabilities that differ between generation and training."""
    correction = objective.importance_sampling_correction
    if correction != "auto":
        return Choice(correction, "the recipe asks for it")
    if objective.top_k is not None or objective.top_p < 1.0 or objective.min_p > 0.0:
        # The ratio of a completion would be the product of the shares that the filters kept: 0.97 for each of 512
        # tokens leaves nothing of the loss.
        return Choice(
            False, "top_k, top_p or min_p change the probabilities of generation on purpose"
        )
    return Choice(True, "generation computes with other kernels than training; costs no forward")


def teacher_of(recipe: RunPlan) -> ModelConfig | None:
    """The config of the teacher, if there is one."""
    teacher = recipe.objective.taught_by
    return None if teacher is None else known_config(teacher.model)


def teacher_form(recipe: Recipe | RunPlan) -> str:
    """How the matrices of the teacher are kept, if there is one."""
    teacher = recipe.objective.taught_by
    return "none" if teacher is None else teacher.quantize


def extra_forwards(recipe: Recipe | RunPlan) -> int:
    """Additional forward passes of a step."""
    # RLOO and PPO take the divergence off the rewards: their forwards are of a rollout (`RolloutShape.scored_passes`).
    is_of_rollout = isinstance(recipe.objective, Rloo | Ppo)
    reference = reference_of(recipe.objective, recipe.adapter, recipe.vision.train).value
    of_reference = reference in ("adapters", "copy") and not is_of_rollout
    return int(of_reference) + int(recipe.objective.own_teacher is not None)


def teacher_streams(recipe: Recipe | RunPlan) -> bool:
    """Whether the layers of the teacher are on the host."""
    teacher = recipe.objective.taught_by
    return teacher is not None and teacher.stream == "layers"


def scoring_devices_of(recipe: Recipe | RunPlan) -> int:
    """The devices of each host that score and do not train."""
    if isinstance(recipe, RunPlan):
        return recipe.train.scoring_devices
    return recipe.parallel.scoring_devices


def teacher_place(recipe: Recipe | RunPlan, *, aligns_texts: bool) -> TeacherPlace:
    """Where the teacher is, if there is one that is another model. `aligns_texts`: it has another tokenizer."""
    if recipe.objective.taught_by is None or scoring_devices_of(recipe) == 0:
        return "device"
    return "away" if aligns_texts else "output"


def teacher_tokens(recipe: Recipe | RunPlan) -> int:
    """The most loss tokens of a step where the pass of the teacher is before the step's own; else 0."""
    is_before = recipe.objective.own_teacher is not None or teacher_streams(recipe)
    return most_loss_tokens(recipe) if is_before else 0


def most_loss_tokens(recipe: Recipe | RunPlan) -> int:
    """Of a step with a teacher."""
    objective = recipe.objective
    train = recipe.train
    sequences = train.batch_size if isinstance(train, Train) else train.sequences_per_step
    longest = recipe.data.sequence_length
    if isinstance(objective, Rollouts):
        return (sequences or objective.num_generations) * objective.max_completion_length
    return (sequences or 1) * longest


def memory_setting(plan: RunPlan) -> str:
    """`StepShape.setting` of a plan."""
    return setting_of(
        mode_of(plan, plan.model.config),
        extra_forwards=extra_forwards(plan),
        teacher=teacher_of(plan),
        teacher_quantize=teacher_form(plan),
        is_own_teacher=plan.objective.own_teacher is not None,
        teacher_streams=teacher_streams(plan),
        teacher_place=teacher_place(plan, aligns_texts=plan.aligns_texts),
        offload_activations=plan.train.offload_activations,
    )


# Of an objective with rewards, which may have a teacher.
TEACHER_KEYS = frozenset(
    (
        *("teacher_quantize", "teacher_stream", "teacher_kl_coef", "teacher_prompt_template"),
        "teacher_template_kwargs",
        *("divergence", "jsd_beta", "estimator"),
    )
)

COPIES: Mapping[ReferencePlace, str] = MappingProxyType(
    {
        "none": "no copy",
        "device": "frozen copy",
        "host": "frozen copy on host",
        "nf4": "frozen copy in nf4",
    }
)


def objective_choices(
    recipe: Recipe,
    dataset: DatasetFacts | None,
    teacher: ModelConfig | None,
    reference_place: ReferencePlace = "none",
) -> Iterator[tuple[str, Choice[str]]]:
    """By key: the choices of the objective. `reference_place`: of its frozen copy."""
    reference = reference_of(recipe.objective, recipe.adapter, recipe.vision.train)
    unit = "rollout" if isinstance(recipe.objective, Rloo | Ppo) else "step"
    if reference.value == "adapters":
        yield (
            "objective.reference",
            Choice(
                f"reference per {unit}", f"{reference.reason}; one more forward pass per {unit}"
            ),
        )
    elif reference.value == "copy":
        yield (
            "objective.reference",
            Choice(
                COPIES[reference_place],
                f"{reference.reason}; one more forward pass per {unit}",
            ),
        )
    elif reference.value == "precomputed":
        yield (
            "objective.reference",
            Choice(
                "precomputed reference", f"{reference.reason}; one forward pass over the dataset"
            ),
        )
    if (own := recipe.objective.own_teacher) is not None:
        form = "without its adapter" if own == "base" else "with the weights of the moment"
        reason = f"the model {form} is the teacher; one more forward pass per step"
        yield "objective.teacher", Choice("its own teacher", reason)
    taught_by = recipe.objective.taught_by
    if teacher is not None and taught_by is not None:
        form = "" if taught_by.quantize == "none" else f" in {taught_by.quantize}"
        reason = f"{taught_by.model} stays in memory{form} next to the model"
        if taught_by.stream == "layers":
            reason = (
                f"{taught_by.model}{form} stays in host memory; each layer is copied once per step"
            )
        if recipe.parallel.scoring_devices:
            reason = f"{taught_by.model}{form} is on devices that only score; its output layer is next to the model"
        yield (
            "objective.teacher",
            Choice(f"teacher of {format_count(parameter_count(teacher))}", reason),
        )
    if dataset is not None and (scores := dataset.teacher_scores) is not None:
        reason = (
            f"{format_bytes(scores.bytes)} of the teacher's {scores.top:,} likeliest tokens, {scores.token_bytes:,}"
            " bytes per token of an answer; no teacher is in memory"
        )
        yield "objective.teacher_scores", Choice("stored scores", reason)
    if dataset is not None and (alignment := dataset.alignment) is not None:
        aligned, alone = (
            f"{100 * count / max(1, alignment.tokens):.1f}%"
            for count in (alignment.aligned, alignment.alone)
        )
        reason = (
            f"the teacher has another tokenizer: of {alignment.tokens:,} tokens of prompts {aligned} are in spans that"
            f" both split at the same bytes, {alone} are such a span alone"
        )
        yield "objective.estimator", Choice("spans of text", reason)
    if isinstance(recipe.objective, Rollouts) and (rate := getattr(recipe.adapter, "dropout", 0.0)):
        reason = (
            f"not {rate:g}: completions are sampled without dropout, and trained on as they were"
        )
        yield "adapter.dropout", Choice("no dropout", reason)
    if isinstance(recipe.objective, Grpo):
        correction = correction_of(recipe.objective)
        yield (
            "objective.importance_sampling_correction",
            Choice("corrected" if correction.value else "not corrected", correction.reason),
        )
    if dataset is not None:
        yield from _chat_choice(recipe, dataset)
    if dataset is not None and dataset.loss_share < 1:
        reason = "of the tokens are loss tokens; the output layer runs on these alone"
        yield (
            "data.chat.train_on",
            Choice(f"{dataset.loss_share:.0%} loss tokens", f"{dataset.loss_share:.1%} {reason}"),
        )


def _chat_choice(recipe: Recipe, dataset: DatasetFacts) -> Iterator[tuple[str, Choice[str]]]:
    """Whether a chat template formats prompts and responses; nothing for plain text."""
    key = "data.chat.template"
    if dataset.template:
        alternative = (
            f"; {key}={NONE} trains on the plain text" if dataset.texts == "prompts" else ""
        )
        reason = f"formats prompts as user and responses as assistant messages, in every data format{alternative}"
        yield key, Choice(dataset.template, reason)
    elif dataset.texts == "whole":
        yield key, Choice(NONE, "pairs without a prompt column are plain text")
    elif dataset.texts == "prompts":
        reason = "the tokenizer has no chat template"
        if recipe.data.chat.template == NONE:
            reason = "set in the recipe"
        elif recipe.objective.spec.reads_text:
            reason = "pretraining reads text"
        yield (
            key,
            Choice(NONE, f"{reason}: prompt and response are one plain text, without messages"),
        )
