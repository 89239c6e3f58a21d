"""Settings under which a device is right that computes something wrong with those of the plan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch

from bloomery.check.examination import Examination, Fault, examine
from bloomery.check.parts import Kind
from bloomery.facts.attention import missing_feature
from bloomery.facts.optimizers import OPTIMIZERS, PLAIN_SETTINGS
from bloomery.plan.types import OptimizerPlan, RunPlan
from bloomery.recipe.schema import Quantize

Precision = Literal["float32", "bfloat16", "float16", "bfloat16-pure"]
PRECISIONS: tuple[Precision, ...] = ("float16", "bfloat16", "float32")


@final
@dataclass(frozen=True)
class Cure:
    """A setting under which all parts are right, as on the command line, and in few words."""

    setting: str
    text: str


def cure_of(
    plan: RunPlan, fault: Fault, examined: Callable[[RunPlan], Examination] = examine
) -> Cure | None:
    """The first change of the recipe under which the whole check finds nothing; None where there is none."""
    if fault.is_fatal:
        return None
    for cure, changed_plan in changes(plan, fault.kind):
        try:
            if not examined(changed_plan).faults:
                return cure
        except torch.AcceleratorError:
            return None
        except Exception:
            continue  # a setting that this device cannot run is no cure
    return None


def changes(plan: RunPlan, kind: Kind) -> Iterator[tuple[Cure, RunPlan]]:
    """What may help a part of this kind, the cheapest first: what changes no number of the recipe's."""
    if plan.train.compile:
        yield Cure("train.compile=false", "turn torch.compile off"), uncompiled(plan)
    if (
        kind in ("attention", "layer", "compiled layer", "step")
        and plan.model.attention != "blockwise"
    ):
        yield (
            Cure("train.attention=blockwise", "use blockwise attention"),
            _with_attention(plan, "blockwise"),
        )
    if plan.train.activation_checkpointing != "none" and kind in (
        "layer",
        "compiled layer",
        "step",
    ):
        train = plan.train.model_copy(update={"activation_checkpointing": "none"})
        yield (
            Cure("train.activation_checkpointing=none", "keep activations"),
            plan.model_copy(update={"train": train}),
        )
    if kind in ("optimizer", "step"):
        for cure, optimizer in _other_optimizers(plan.optimizer):
            yield cure, plan.model_copy(update={"optimizer": optimizer})
    if kind == "dequantization":
        for cure, quantize in _other_quantization(plan.quantize):
            # Another kind is dequantized by PyTorch.
            is_same_kind = quantize.kind == plan.quantize.kind
            reader = plan.quantized_by if is_same_kind else "torch"
            yield cure, plan.model_copy(update={"quantize": quantize, "quantized_by": reader})
    if kind != "optimizer" or plan.train.precision == "bfloat16-pure":
        for precision in PRECISIONS:
            if precision != plan.train.precision:
                yield (
                    Cure(f"train.precision={precision}", f"use {precision}"),
                    _with_precision(plan, precision),
                )


def uncompiled(plan: RunPlan) -> RunPlan:
    return plan.model_copy(
        update={
            "train": plan.train.model_copy(update={"compile": False}),
            "quantized_by": "torch" if plan.quantized_by == "compiled" else plan.quantized_by,
        }
    )


def _with_attention(plan: RunPlan, backend: str) -> RunPlan:
    return plan.model_copy(update={"model": plan.model.model_copy(update={"attention": backend})})


def _with_precision(plan: RunPlan, precision: Precision) -> RunPlan:
    """Where the attention of the plan does not compute in it, with blockwise attention, as the planner decides."""
    config = plan.model.config
    unsupported = missing_feature(
        plan.model.attention,
        device_type=plan.train.device,
        packed=False,
        window=False,
        softcap=config.attention_softcap is not None,
        dropout=False,
        sinks=config.attention_sinks,
        float32=precision == "float32",
    )
    optimizer = plan.optimizer.model_copy(update={"stochastic_rounding": False})
    changed_plan = plan.model_copy(
        update={
            "train": plan.train.model_copy(update={"precision": precision}),
            "optimizer": optimizer,
        }
    )
    return changed_plan if unsupported is None else _with_attention(changed_plan, "blockwise")


def _other_optimizers(optimizer: OptimizerPlan) -> Iterator[tuple[Cure, OptimizerPlan]]:
    """Plain states first; then another optimizer, which trains differently."""
    for key, value in PLAIN_SETTINGS.items():
        if getattr(optimizer, key) != value:
            setting = f"optimizer.{key}={str(value).lower()}"
            yield Cure(setting, f"set {setting}"), optimizer.model_copy(update={key: value})
    for kind, spec in OPTIMIZERS.items():
        if spec.replaces_others and kind != optimizer.kind:
            other = optimizer.model_copy(update={**PLAIN_SETTINGS, "kind": kind})
            yield Cure(f"optimizer.kind={kind}", f"use {kind}"), other


def _other_quantization(quantize: Quantize) -> Iterator[tuple[Cure, Quantize]]:
    if quantize.kind == "nf4" and quantize.double_quant:
        yield (
            Cure("quantize.double_quant=false", "use nf4 without double quantization"),
            quantize.model_copy(update={"double_quant": False}),
        )
    for other in (Quantize(kind="int8"), Quantize(kind="none")):
        if other.kind != quantize.kind:
            text = "use int8" if other.kind == "int8" else "train without quantization"
            yield Cure(f"quantize.kind={other.kind}", text), other


def fix_of(fault: Fault, cure: Cure | None) -> str:
    if fault.is_fatal:
        return (
            "run `bloomery doctor --probe`, which tries every precision in a process of its own;"
            " --no-check trains nevertheless"
        )
    if cure is None:
        return (
            "no setting that was tried is right on it: run `bloomery doctor --probe`, and train on another device"
            " (--devices cpu); --no-check trains nevertheless"
        )
    return f"set {cure.setting}, with which the whole check passes"
