"""Proof that a device computes what the CPU computes, before the first step of a run.

A small model of the run's widths takes one step on the device and in float32 on the CPU; so does every part of it. What
differs by more than rounding is named, with a setting under which the device is right. A device that is right with a
driver, a PyTorch and a recipe's settings is not checked again.
"""

import gc
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, final

import torch

from bloomery.check.exact_numbers import has_formula
from bloomery.check.parts import (
    RESULT,
    Kind,
    PartResult,
    examine_optimizer,
    examine_part,
    parts_of,
)
from bloomery.check.small_model import Pair, build_pair, small_plan
from bloomery.check.whole_step import (
    Difference,
    differences,
    exact_step,
    step_on_device,
)
from bloomery.core import __version__
from bloomery.core.errors import UserError
from bloomery.core.files import cache_folder, write_json
from bloomery.facts.attention import supports
from bloomery.hardware.machine import Machine, read_machine
from bloomery.model.attention.triton_attention import arch_of
from bloomery.monitor.events import Emit, Phase, StepChecked, Warned
from bloomery.parallel.environment import hosts_at_fault, without_host
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Quantize
from bloomery.train.process import out_of_memory
from bloomery.train.run import Unsound

VERSION = 1  # of the check: a changed one does not believe what an earlier one found
FILE = "checked-steps.json"
KEPT = 1000  # answers
Precision = Literal["float32", "bfloat16", "float16", "bfloat16-pure"]
PRECISIONS: tuple[Precision, ...] = ("float16", "bfloat16", "float32")
# Settings of the optimizer that its arithmetic does not depend on.
RATES = ("learning_rate", "muon_learning_rate", "schedule", "min_lr_ratio", "warmup_steps")
# Variables that choose other kernels, or another architecture.
VARIABLES = (
    "HSA_OVERRIDE_GFX_VERSION",
    "TORCH_BLAS_PREFER_HIPBLASLT",
    "ROCBLAS_USE_HIPBLASLT",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    "CUBLAS_WORKSPACE_CONFIG",
)


@final
@dataclass(frozen=True)
class Finding:
    """A part at fault. `quantity`: what of it is wrong; "" and a `message`: it could not be computed."""

    part: str
    kind: Kind
    quantity: str
    error: float = 0.0
    bound: float = 0.0
    message: str = ""
    # An error after which the device does nothing in this process any more.
    is_fatal: bool = False

    @property
    def text(self) -> str:
        """What the device does, such as "computes wrong gradients in q_proj"."""
        if self.message:
            return f"fails in {self.part}"
        if self.quantity.startswith("update"):
            return f"computes wrong updates in {self.part}"
        kind = "gradients" if "gradient" in self.quantity else "results"
        if self.kind == "step":
            return f"computes wrong {kind} in a whole step, where each part is right by itself"
        return f"computes wrong {kind} in {self.part}"

    @property
    def detail(self) -> str:
        if self.message:
            return self.message
        quantity = "" if self.quantity == RESULT else f"{self.quantity}: "
        return f"{quantity}error {self.error:.2g}, at most {self.bound:.2g} is rounding"


@final
@dataclass(frozen=True)
class Examination:
    """What a check found, the first part at fault first. `unrepeatable`: parts with other bits at the second time."""

    findings: tuple[Finding, ...]
    unrepeatable: tuple[str, ...]
    seconds: float


@final
@dataclass(frozen=True)
class Cure:
    """A setting under which all parts are right, as on the command line, and in few words."""

    setting: str
    text: str


def examine(plan: RunPlan) -> Examination:
    """Check the plan's device. Raises torch's out-of-memory errors, and what building the small model raises.

    The state of random generators is as before, and compiled code of the small model is forgotten.
    """
    began = time.perf_counter()
    is_gpu = plan.train.device != "cpu"
    findings: list[Finding] = []
    unrepeatable: list[str] = []
    try:
        with torch.random.fork_rng(devices=[torch.cuda.current_device()] if is_gpu else []):
            _examine_pair(build_pair(small_plan(plan)), findings, unrepeatable)
        gc.collect()
        if plan.train.compile:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        if is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    except torch.AcceleratorError:
        # After an error of the device nothing works on it any more, not even to restore a generator.
        if not findings:
            raise
    return Examination(tuple(findings), tuple(unrepeatable), time.perf_counter() - began)


def _examine_pair(pair: Pair, findings: list[Finding], unrepeatable: list[str]) -> None:
    """Adds what is wrong, and the parts whose bits differ."""
    for finding, name in _examined_parts(pair):
        if finding is not None:
            findings.append(finding)
        if name:
            unrepeatable.append(name)
    # A part at fault makes a step wrong, too, and is the better name for it.
    if not findings:
        step_findings, same_bits = examine_step(pair)
        findings += step_findings
        if not same_bits and not unrepeatable:
            unrepeatable.append("a whole step")


def _examined_parts(pair: Pair) -> Iterator[tuple[Finding | None, str]]:
    """Of each part, what is wrong with it, and its name where bits differ.

    A layer is made of the other parts, so that it is not looked at where one of these is wrong; nor is anything after
    an error of the device, which may be in no state to go on.
    """
    is_wrong = False
    for part in parts_of(pair):
        if is_wrong and part.kind in ("layer", "compiled layer"):
            continue
        finding, unrepeatable = _examined(part.name, part.kind, partial(examine_part, part, pair))
        is_wrong |= finding is not None
        yield finding, unrepeatable
        if finding is not None and finding.message:
            return
    kind = pair.tested.plan.optimizer.kind
    yield _examined(f"the optimizer ({kind})", "optimizer", lambda: examine_optimizer(pair))


def _examined(
    name: str, kind: Kind, compute: Callable[[], PartResult]
) -> tuple[Finding | None, str]:
    try:
        result = compute()
    except Exception as error:  # whatever a driver, a compiler or a library raises is a finding
        if out_of_memory(error):
            raise
        first_line = str(error).strip().partition("\n")[0][:200]
        message = f"{type(error).__name__}: {first_line}"
        is_fatal = isinstance(error, torch.AcceleratorError)
        return Finding(name, kind, "", message=message, is_fatal=is_fatal), ""
    finding = None
    if result.differences:
        first = result.differences[0]
        finding = Finding(name, kind, first.quantity, first.error, first.bound)
    return finding, name if result.different_bits else ""


def examine_step(pair: Pair) -> tuple[list[Finding], bool]:
    """What is wrong in two equal steps, and whether their bits are the same."""
    exact = exact_step(pair)
    steps = [step_on_device(pair) for _ in range(2)]
    # The first step that differs is enough.
    step_differences: list[Difference] = []
    for numbers in steps:
        step_differences = step_differences or differences(pair, numbers, exact)
    findings = [
        Finding("a whole step", "step", difference.quantity, difference.error, difference.bound)
        for difference in step_differences
    ]
    return findings[:1], steps[0].has_bits_of(steps[1])


# Settings under which the device is right


def cure_of(
    plan: RunPlan, finding: Finding, examined: Callable[[RunPlan], Examination] = examine
) -> Cure | None:
    """The first change of the recipe under which the whole check finds nothing; None where there is none."""
    if finding.is_fatal:
        return None
    for cure, changed_plan in changes(plan, finding.kind):
        try:
            if not examined(changed_plan).findings:
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
        yield from _other_optimizers(plan)
    if kind == "dequantization":
        yield from _other_quantization(plan)
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
    unsupported = supports(
        plan.model.attention,
        device_type=plan.train.device,
        packed=False,
        window=False,
        softcap=config.attention_softcap is not None,
        dropout=False,
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


def _other_optimizers(plan: RunPlan) -> Iterator[tuple[Cure, RunPlan]]:
    """Plain states first; then another optimizer, which trains differently."""
    plain = {
        "state_dtype": "float32",
        "offload": False,
        "fused_backward": False,
        "stochastic_rounding": False,
    }
    for key, value in plain.items():
        if getattr(plan.optimizer, key) != value:
            setting = f"optimizer.{key}={str(value).lower()}"
            optimizer = plan.optimizer.model_copy(update={key: value})
            yield Cure(setting, f"set {setting}"), plan.model_copy(update={"optimizer": optimizer})
    for kind in ("adamw", "adafactor"):
        if kind != plan.optimizer.kind:
            optimizer = plan.optimizer.model_copy(update={**plain, "kind": kind})
            yield (
                Cure(f"optimizer.kind={kind}", f"use {kind}"),
                plan.model_copy(update={"optimizer": optimizer}),
            )


def _other_quantization(plan: RunPlan) -> Iterator[tuple[Cure, RunPlan]]:
    quantize = plan.quantize
    if quantize.kind == "nf4" and quantize.double_quant:
        changed = quantize.model_copy(update={"double_quant": False})
        yield (
            Cure("quantize.double_quant=false", "use nf4 without double quantization"),
            plan.model_copy(update={"quantize": changed}),
        )
    for other in (Quantize(kind="int8"), Quantize(kind="none")):
        if other.kind != quantize.kind:
            text = "use int8" if other.kind == "int8" else "train without quantization"
            update = {"quantize": other, "quantized_by": "torch"}
            yield Cure(f"quantize.kind={other.kind}", text), plan.model_copy(update=update)


# What is kept


@final
@dataclass(frozen=True)
class Identity:
    """What an answer holds for: the device, and what runs on it."""

    device: str
    arch: str  # such as gfx1030 or sm_90
    torch: str
    runtime: str  # HIP or CUDA
    driver: str
    unit: str  # its UUID: one of several equal cards may be faulty


def identity_of(plan: RunPlan, machine: Machine | None) -> Identity:
    device = torch.device(plan.train.device)
    name = platform.processor() or platform.machine()
    unit = ""
    if device.type != "cpu":
        properties = torch.cuda.get_device_properties(device)
        name = properties.name
        unit = str(getattr(properties, "uuid", ""))
    driver = ""
    if machine is not None:
        facts = machine.host.driver
        driver = " ".join(
            filter(None, (facts.nvidia, facts.amdgpu_version, facts.rocm, f"Linux {facts.kernel}"))
        )
    return Identity(
        device=name,
        arch=arch_of(device),
        torch=torch.__version__,
        runtime=torch.version.hip or torch.version.cuda or "",
        driver=driver,
        unit=unit,
    )


def key_of(plan: RunPlan, identity: Identity) -> str:
    """A hash of the device and of every setting that chooses what it computes, not of rates and lengths."""
    small = small_plan(plan)
    settings = {
        "model": small.model.model_dump(mode="json"),
        "train": small.train.model_dump(
            mode="json", exclude={"steps", "seconds", "min_steps", "max_grad_norm", "threads"}
        ),
        "optimizer": small.optimizer.model_dump(mode="json", exclude={*RATES, "decay_steps"}),
        "adapter": small.adapter.model_dump(mode="json"),
        "quantize": [small.quantize.model_dump(mode="json"), small.quantized_by],
        "layout": small.data.layout,
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }
    content = [VERSION, __version__, asdict(identity), settings]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def known_answer(key: str) -> Examination | None:
    """That of a check that found nothing; None without one."""
    entry = _answers().get(key)
    if not isinstance(entry, dict) or entry.get("findings") != []:
        return None
    unrepeatable = entry.get("unrepeatable", [])
    return Examination((), tuple(map(str, unrepeatable)), 0.0)


def keep_answer(key: str, identity: Identity, examination: Examination) -> None:
    """In the cache folder, with the device, PyTorch and driver. One with findings is there to be read, not used."""
    answers = _answers()
    answers.pop(key, None)
    answers[key] = {
        **asdict(identity),
        "at": time.time(),
        "seconds": round(examination.seconds, 2),
        "findings": [f"{finding.text} ({finding.detail})" for finding in examination.findings],
        "unrepeatable": list(examination.unrepeatable),
    }
    write_json(cache_folder() / FILE, dict(list(answers.items())[-KEPT:]))


def _answers() -> dict[str, Any]:
    """By key. A damaged file counts as empty."""
    try:
        content = json.loads((cache_folder() / FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Before the first step


class WrongNumbers(UserError):
    """The device computes something else than the CPU, in a part for which no safer kernel can be taken unasked."""


@final
@dataclass(frozen=True)
class Verdict:
    """Of one rank. `problem` is "" where the device is right."""

    device: str
    arch: str
    torch: str
    driver: str
    problem: str = ""
    detail: str = ""
    fix: str = ""
    in_attention: bool = False
    unrepeatable: str = ""  # the part
    skipped: str = ""  # why nothing was checked
    seconds: float = 0.0
    from_cache: bool = False  # it is the answer of an earlier check


def is_checked(plan: RunPlan) -> bool:
    """Whether the plan's device is: a GPU. A CPU that is compared with itself gives no news.

    Layers of transformers are compared with transformers' own forward instead (`step_health.check_attention`).
    """
    return plan.train.device != "cpu" and plan.model.config.transformers_backend is None


def check_step(
    plan: RunPlan, run_dir: Path, emit: Emit, mesh: Mesh = SINGLE_RANK, *, asked: bool = True
) -> None:
    """Check the device of each rank, unless one like it was with these settings; all ranks end alike.

    `asked`: what rank 0 says counts. Raises Unsound where attention is at fault, WrongNumbers for other parts.
    """
    if not mesh.all_gather_json(asked and is_checked(plan))[0]:
        return
    machine_file = run_dir / "machine.json"
    machine = read_machine(machine_file) if machine_file.is_file() else None
    own_verdict = judge(plan, machine, begins=lambda: emit(Phase(name="check")))
    verdicts = [Verdict(**entry) for entry in mesh.all_gather_json(asdict(own_verdict))]

    # The slowest rank's seconds, and the first problem.
    worst = next((verdict for verdict in verdicts if verdict.problem), verdicts[0])
    emit(
        StepChecked(
            device=worst.device,
            arch=worst.arch,
            torch=worst.torch,
            driver=worst.driver,
            precision=plan.train.precision,
            problem=worst.problem,
            detail=worst.detail,
            fix=worst.fix,
            unrepeatable=next(filter(None, (verdict.unrepeatable for verdict in verdicts)), ""),
            not_compared=not_compared(plan),
            seconds=max(verdict.seconds for verdict in verdicts),
            from_cache=all(verdict.from_cache for verdict in verdicts),
        )
    )
    for verdict in verdicts:
        if verdict.skipped:
            emit(Warned(reason=f"the step was not checked on {verdict.device}: {verdict.skipped}"))
            break
    if worst.problem:
        wrong_ranks = [rank for rank, verdict in enumerate(verdicts) if verdict.problem]
        host = hosts_at_fault(mesh.hosts, wrong_ranks)
        where = f"{worst.device} ({worst.arch}), PyTorch {worst.torch}: {worst.detail}"
        if mesh.world > 1:
            on_host = f" on {mesh.hosts[wrong_ranks[0]]}" if host else ""
            where = f"rank {wrong_ranks[0]}{on_host}, {where}"
        fix = f"{worst.fix}; or leave the host out: {without_host(host)}" if host else worst.fix
        error = Unsound if worst.in_attention else WrongNumbers
        raise error(worst.problem, where=where, fix=fix, host=host)
    warn_of_bits(plan, verdicts, emit)


def not_compared(plan: RunPlan) -> str:
    """What of a step the check does not compare; "" where it compares everything."""
    kind = plan.optimizer.kind
    return "" if has_formula(plan.optimizer) else f"the updates of optimizer.kind={kind}"


def warn_of_bits(plan: RunPlan, verdicts: list[Verdict], emit: Emit) -> None:
    """Names a device that computes other bits at the second time: a warning, or a refusal of a deterministic run."""
    verdict = next((verdict for verdict in verdicts if verdict.unrepeatable), None)
    if verdict is None:
        return
    problem = f"{verdict.device} gives different bits when it computes {verdict.unrepeatable} twice"
    if plan.train.deterministic:
        raise WrongNumbers(
            problem,
            where="train.deterministic=true",
            fix="set train.attention=blockwise or train.compile=false; or train.deterministic=false",
        )
    emit(Warned(reason=f"{problem}: a repeated or resumed run will differ in its last digits"))


def judge(
    plan: RunPlan, machine: Machine | None, begins: Callable[[], None] = lambda: None
) -> Verdict:
    """Check this process's device, or read that it was checked. `begins`: called before a check."""
    identity = identity_of(plan, machine)
    verdict = Verdict(identity.device, identity.arch, identity.torch, identity.driver)
    try:
        key = key_of(plan, identity)
        earlier_examination = known_answer(key)
        if earlier_examination is None:
            begins()
        examination = earlier_examination or examine(plan)
    except UserError as error:
        return replace(verdict, skipped=error.problem)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return replace(verdict, skipped="not enough memory for the small model")
    if earlier_examination is None:
        keep_answer(key, identity, examination)
    verdict = replace(
        verdict,
        unrepeatable=next(iter(examination.unrepeatable), ""),
        seconds=examination.seconds,
        from_cache=earlier_examination is not None,
    )
    if not examination.findings:
        return verdict
    finding = examination.findings[0]
    return replace(
        verdict,
        problem=problem_of(plan, finding),
        detail=finding.detail,
        fix=fix_of(finding, cure_of(plan, finding)),
        in_attention=finding.kind == "attention",
    )


def problem_of(plan: RunPlan, finding: Finding) -> str:
    """Such as "this GPU computes wrong gradients in q_proj with bfloat16"."""
    device = "CPU" if plan.train.device == "cpu" else "GPU"
    precision = "" if finding.kind == "optimizer" else f" with {plan.train.precision}"
    return f"this {device} {finding.text}{precision}"


def fix_of(finding: Finding, cure: Cure | None) -> str:
    if finding.is_fatal:
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
