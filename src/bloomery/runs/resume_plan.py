"""The plan of a resumed run: your overrides, what another machine changes, settings after a crash. No torch."""

import json
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from pydantic import BaseModel, ValidationError

from bloomery.core.errors import UserError
from bloomery.core.run_folder import RunFolder
from bloomery.core.units import counted, format_seconds
from bloomery.hardware.machine import Machine
from bloomery.hardware.vendors import DRIVER_ERROR, LIBRARY_ERROR
from bloomery.launch.exit_codes import (
    DIVERGED,
    FAILED,
    KERNEL_FAILED,
    LINK_FAILED,
    OUT_OF_MEMORY,
    UNSOUND,
)
from bloomery.launch.stage_ends import StageResult
from bloomery.plan.fallback import (
    Fallback,
    blockwise,
    plainer,
    roomier,
    steadier,
    through_the_host,
)
from bloomery.plan.store import read_sealed, write_sealed
from bloomery.plan.types import RunPlan
from bloomery.recipe.aliases import known_keys, look_up
from bloomery.recipe.load import LoadedRecipe, load_recipe, unset_keys
from bloomery.recipe.objectives import Rollouts
from bloomery.recipe.schema import LENGTHS
from bloomery.train.optim.schedules import planned_lr_scale
from bloomery.train.run_clock import fraction_done

ALLOWED = (
    *(f"train.{key}" for key in LENGTHS),
    "eval.",
    "sample.",
    "checkpoint.",
    "logging.",
    "parallel.",
)
MACHINE_DEPENDENT: dict[str, tuple[str, ...]] = {
    "model": ("attention", "score_chunk", "scores"),
    "data": ("pin_memory", "prefetch"),
    "optimizer": ("fused",),
    "train": (
        "micro_batch_size",
        "accumulation",
        "empty_sequences",
        "precision",
        "compile",
        "activation_checkpointing",
        "deterministic",
        "threads",
        "device",
        "replicate",
        "shard",
        "pipeline",
        "context",
        "pipeline_schedule",
        "pipeline_layers",
        "pipeline_link",
        "stream",
        "stream_host",
        "stream_micro_batches",
        "scoring_devices",
    ),
    "checkpoint": ("async_save",),
    "eval": ("micro_batch_size",),
    "objective": ("reference",),  # of rollouts: the place of a frozen copy of the start
}
TOGETHER = "train.stream_micro_batches"
BITWISE = ("model", "optimizer", "train")  # sections in which another choice rounds differently
# But for these fields: they move numbers, and change none.
EXACT = (
    *("train.pipeline_link", "train.stream", "train.stream_host", "train.scoring_devices"),
    TOGETHER,
)
# On the same machine a resumed run is bitwise identical to an uninterrupted one. This is what holds on another machine:
# the same sequences and hyperparameters in every step, so that losses differ only by how sums are rounded.
ROUNDING_WARNING = "from this step on, losses are equal to an uninterrupted run up to rounding, not bitwise identical"

# Dropout, and noise on embeddings, are drawn by the position in the data, the micro-batch and the data-parallel rank.
DRAWN_BY = ("micro_batch_size", "accumulation", "device", "replicate", "shard", "context")
DROPOUT_WARNING = (
    "from this step on, dropout draws other random numbers: losses are those of a run with another seed, not bitwise"
    " identical and not equal up to rounding"
)


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Raises UserError (code 2) for the first override that a resumed run does not accept."""
    for override in overrides:
        key, _, value = override.partition("=")
        if not _may_change(key):
            path = tuple(key.split("."))
            if path not in known_keys():
                alias = look_up(path, value, {})
                fix = str(alias) if alias else "`bloomery recipes show everything` shows every key"
                raise UserError(f"no such key: {key}", where="bloomery resume", fix=fix, code=2)
            raise UserError(
                f"cannot change {key} in a resumed run",
                where="bloomery resume",
                fix="change only the length (train.epochs, train.max_steps), eval.*, sample.*, checkpoint.*, "
                "logging.* and parallel.*, or start a new run with `bloomery train`",
                code=2,
            )


def _may_change(key: str) -> bool:
    return any(
        key == allowed or (allowed.endswith(".") and key.startswith(allowed)) for allowed in ALLOWED
    )


def refuse_other_recipe(folder: RunFolder, new_recipe: LoadedRecipe, *, job: str) -> None:
    """Raises UserError (code 2) where a `job` that began the run is started again with another recipe.

    A key that neither sets is the same: the run keeps the default that it began with, which may be an older one.
    """
    stored_recipe = load_recipe(folder.recipe).recipe
    unset = unset_keys(folder.recipe.read_text(encoding="utf-8"))

    def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(inner, f"{path}.{key}" if path else str(key))
        else:
            yield path, value

    old_values, new_values = (
        dict(leaves(recipe.model_dump(mode="json", by_alias=True)))
        for recipe in (stored_recipe, new_recipe.recipe)
    )
    changed_keys = [
        key
        for key in new_values | old_values
        if new_values.get(key) != old_values.get(key)
        and not _may_change(key)
        and not (key in unset and new_recipe.provenance.get(key, "default") == "default")
    ]
    if changed_keys:
        key = changed_keys[0]
        raise UserError(
            f"the run of {job} has another recipe: {key} is {old_values.get(key)} there, and {new_values.get(key)} now",
            where=str(folder.path),
            fix="name a new run: --run-dir DIR, or torchrun --rdzv-id NAME; "
            f"`bloomery resume {folder.name}` continues the old one",
            code=2,
        )


def plan_differences(old_machine: Machine, new_machine: Machine) -> list[str]:
    """Changes of the machine that can change a result, one short text each."""
    pairs = (
        ("devices", _devices(old_machine), _devices(new_machine)),
        ("CPU", old_machine.host.cpu_name, new_machine.host.cpu_name),
        ("CPU cores", old_machine.host.cpu_cores, new_machine.host.cpu_cores),
        ("C++ compiler", old_machine.host.compiler or "none", new_machine.host.compiler or "none"),
        ("PyTorch", old_machine.software.torch, new_machine.software.torch),
        ("PyTorch build", old_machine.software.build, new_machine.software.build),
    )
    return [
        f"{name} changed: {old_value} -> {new_value}"
        for name, old_value, new_value in pairs
        if old_value != new_value
    ]


def _devices(machine: Machine) -> str:
    return (
        ", ".join(f"{device.name} ({device.arch})" for device in machine.accelerators) or "no GPU"
    )


def with_machine_choices(stored_plan: RunPlan, fresh_plan: RunPlan) -> tuple[RunPlan, list[str]]:
    """The stored plan with the machine-dependent choices of `fresh_plan`, and each choice that changed with its reason.

    The last text is ROUNDING_WARNING where a choice that changed rounds differently, and DROPOUT_WARNING where dropout
    then draws other numbers.
    """
    fresh_plan = _of_the_same_batch(fresh_plan, stored_plan)
    sections = dict[str, BaseModel]()
    changes: list[str] = []
    reasons = {decision.key: decision.reason for decision in fresh_plan.choices}
    reasons["model.attention"] = reasons["train.attention"]  # the recipe's key for it
    exact = True
    for section, fields in MACHINE_DEPENDENT.items():
        old_section = getattr(stored_plan, section)
        new_section = getattr(fresh_plan, section)
        # What a fallback chose stays.
        movable = [
            field
            for field in fields
            if f"{section}.{field}" not in stored_plan.recovered and hasattr(old_section, field)
        ]
        changed_fields = {
            field: getattr(new_section, field)
            for field in movable
            if getattr(old_section, field) != getattr(new_section, field)
        }
        sections[section] = old_section.model_copy(update=changed_fields)
        for field, value in changed_fields.items():
            key = f"{section}.{field}"
            reason = f": {reasons[key]}" if key in reasons else ""
            changes.append(f"{key}: {getattr(old_section, field)} -> {value}{reason}")
        keys = {f"{section}.{field}" for field in changed_fields}
        rounds_differently = bool(keys - {*EXACT}) or (
            TOGETHER in keys and _trains_tied(stored_plan)
        )
        exact = exact and not (rounds_differently and section in BITWISE)
    new_train = sections["train"]
    draws_differently = any(
        getattr(stored_plan.train, field) != getattr(new_train, field) for field in DRAWN_BY
    )
    if draws_differently and _has_dropout(stored_plan):
        changes.append(DROPOUT_WARNING)
    elif not exact:
        changes.append(ROUNDING_WARNING)
    facts = {
        name: getattr(fresh_plan, name)
        for name in ("memory", "step_seconds", "torch", "choices", "parallel", "stream", "scoring")
    }
    return stored_plan.model_copy(update=sections | facts), changes


def _trains_tied(plan: RunPlan) -> bool:
    """Whether a matrix is trained that is both embedding and head: of micro-batches that share loads of streamed layers
    its gradients as head come first.
    """
    saved_modules: list[str] = getattr(plan.adapter, "modules_to_save", [])
    return plan.model.config.tie_embeddings and (plan.adapter.kind == "none" or bool(saved_modules))


def _has_dropout(plan: RunPlan) -> bool:
    """Whether training draws random numbers in the forward pass; objectives with rollouts switch dropout off."""
    config = plan.model.config
    rates = (config.embedding_dropout, config.residual_dropout, config.attention_dropout)
    has_rate = any(rates) or bool(getattr(plan.adapter, "dropout", 0.0))
    is_dropped = has_rate and not isinstance(plan.objective, Rollouts)
    return is_dropped or bool(plan.train.neftune_alpha)


def _of_the_same_batch(fresh_plan: RunPlan, stored_plan: RunPlan) -> RunPlan:
    """`fresh_plan` with micro-batches that make the tokens per step of `stored_plan`: a batch is part of the training.

    With a fused backward, a batch that the recipe leaves open is what the machine can hold.
    """
    tokens = stored_plan.train.tokens_per_step
    train = fresh_plan.train
    if train.tokens_per_step == tokens:
        return fresh_plan
    sequences = tokens // stored_plan.data.sequence_length
    most_sequences = -(-sequences // train.data_parallel)  # of the rank that gets most
    sizes = (
        (most_sequences,)
        if stored_plan.optimizer.fused_backward
        else range(min(train.micro_batch_size, most_sequences), 0, -1)
    )
    size = next(size for size in sizes if most_sequences % size == 0)
    batch_fields = {
        "tokens_per_step": tokens,
        "micro_batch_size": size,
        "accumulation": most_sequences // size,
        "empty_sequences": most_sequences * train.data_parallel - sequences,
    }
    return fresh_plan.model_copy(update={"train": train.model_copy(update=batch_fields)})


def with_overrides(stored_plan: RunPlan, fresh_plan: RunPlan, overrides: Sequence[str]) -> RunPlan:
    """The stored plan with the overridden settings of `fresh_plan`: length, evaluation, checkpoints, logging."""
    sections = {override.partition("=")[0].partition(".")[0] for override in overrides}
    update: dict[str, object] = {
        section: getattr(fresh_plan, section)
        for section in ("eval", "sample", "checkpoint", "logging")
        if section in sections
    }
    if "train" in sections:
        fields = ("steps", "seconds", "min_steps")
        length = {name: getattr(fresh_plan.train, name) for name in fields}
        update["train"] = stored_plan.train.model_copy(update=length)
        update["optimizer"] = stored_plan.optimizer.model_copy(
            update={"decay_steps": fresh_plan.optimizer.decay_steps}
        )
        update["total_tokens"] = fresh_plan.total_tokens
    if fresh_plan.lengths is not None:
        update["lengths"] = fresh_plan.lengths
    return stored_plan.model_copy(update=update)


def rising_rate(old_plan: RunPlan, new_plan: RunPlan, *, step: int, seconds: float) -> str | None:
    """That the learning rate rises again after `step` steps and `seconds`, as the schedule follows another length.

    None where it falls on as before, and in a warmup, which rises by itself.
    """
    if step == 0:
        return None

    def rate(plan: RunPlan, at_step: int) -> float:
        fraction = fraction_done(plan.train, step=at_step, seconds=seconds)
        scale = planned_lr_scale(at_step, plan, fraction_done=fraction)
        return scale * plan.optimizer.learning_rate

    last_rate = rate(old_plan, step - 1)
    next_rate = rate(new_plan, step)
    warms_up = rate(old_plan, step) > last_rate
    if warms_up or next_rate <= last_rate * (1 + SAME_RATE):
        return None
    train = new_plan.train
    length = counted(train.steps, "steps") if train.steps else format_seconds(train.seconds or 0.0)
    schedule = new_plan.optimizer.schedule
    shape = schedule if isinstance(schedule, str) else schedule.kind
    follows = f"the {shape} schedule is stretched to {length}"
    if shape == "wsd":
        follows = f"the decay moves to the end of {length}"
    return (
        f"the learning rate rises from {last_rate:.2g} at step {step:,} to {next_rate:.2g} at step"
        f" {step + 1:,}: {follows}"
    )


SAME_RATE = 0.01  # a rise by less than this share is none
FALLBACK_CODES = (OUT_OF_MEMORY, UNSOUND, DIVERGED, LINK_FAILED, KERNEL_FAILED)
# Without --recover, where the fallback only costs time.
UNASKED_CODES = (OUT_OF_MEMORY, LINK_FAILED, KERNEL_FAILED)
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
# Errors of a GPU runtime, its libraries or the compiler when a kernel fails.
KERNEL = re.compile(
    rf"{DRIVER_ERROR}|no kernel image|{LIBRARY_ERROR}|"
    r"InductorError|BackendCompilerFailed|triton\.\w*[Cc]ompil\w*|PassManager::run failed"
)


@final
@dataclass(frozen=True)
class FallbackAfter:
    """A fallback and its reason. `unasked`: without --recover, as only time is lost."""

    fallback: Fallback
    reason: str
    unasked: bool = False


def next_fallback(
    plan: RunPlan, ending: StageResult, *, bfloat16: bool = False
) -> FallbackAfter | None:
    """The fallback after a failed stage; None where none helps: a recipe error, a full disk, a lost host.

    `bfloat16`: whether the device has bf16 matmuls.
    """
    if ending.stage != "train" or ending.lost:
        return None
    reason = None
    if ending.code == -signal.SIGKILL:
        reason = "training process killed (SIGKILL), probably out of host memory"
    elif -ending.code in CRASHES:
        reason = f"training process killed by {signal.Signals(-ending.code).name}"
    elif ending.report is not None and ending.code in FALLBACK_CODES:
        reason = str(ending.report["problem"])
    elif ending.report is None and ending.code == FAILED:
        reason = next(
            (line.strip()[:200] for line in reversed(ending.tail) if KERNEL.search(line)), None
        )
    if reason is None:
        return None
    fallback: Fallback | None
    if ending.code == LINK_FAILED:
        fallback = through_the_host(plan, reason)
    elif ending.code in (-signal.SIGKILL, OUT_OF_MEMORY):
        fallback = roomier(plan, reason)
    elif ending.code == DIVERGED:
        fallback = steadier(plan, reason, bfloat16=bfloat16)
    else:
        is_kernel = ending.code in (UNSOUND, KERNEL_FAILED)
        fallback = (blockwise(plan, reason) if is_kernel else None) or plainer(plan, reason)
    return (
        None
        if fallback is None
        else FallbackAfter(
            fallback,
            reason,
            unasked=ending.code in UNASKED_CODES and fallback.only_time,
        )
    )


def store_fallback(folder: RunFolder, fallback_after: FallbackAfter) -> None:
    """Stores the fallback for `bloomery resume RUN --recover`, which applies it before its first step."""
    entry = {
        "reason": fallback_after.reason,
        "action": fallback_after.fallback.action,
        "plan": fallback_after.fallback.plan.model_dump_json(),
    }
    write_sealed(folder.path, {folder.fallback.name: json.dumps(entry)})


def take_fallback(folder: RunFolder) -> FallbackAfter | None:
    """Removes and returns the stored fallback; None when there is none, or it is from another version."""
    try:
        entry = json.loads(
            read_sealed(folder.fallback, fix="delete it, and resume without --recover")
        )
        plan = RunPlan.model_validate_json(entry["plan"])
        fallback = FallbackAfter(Fallback(plan, entry["action"]), entry["reason"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        fallback = None
    folder.fallback.unlink(missing_ok=True)
    return fallback
