"""Parts `same` and `rollout`: short runs on the device with the same runs on the CPU beside them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, final

import torch

from bloomery.bench.gpu_check.child import PartJob, rows_of
from bloomery.bench.gpu_check.results import Row
from bloomery.bench.gpu_check.small_runs import RunNumbers, SmallRuns
from bloomery.facts.attention import BACKENDS, missing_feature
from bloomery.plan.types import RunPlan

# How far losses and gradient norms may be from the CPU's, relative to them. Chosen, between two figures. From below:
# right implementations of three steps of this model differed by 3e-7 in float32 (DPO) and by 2e-4 in bfloat16; TF32,
# which devices may take for float32, has roundings of 2^-11 = 5e-4, and four of them are the 2e-3. From above: a kernel
# that is wrong by 10%, and races of copies, moved losses by percents. A gradient goes through twice as many products,
# and AdamW's first steps have the size of the learning rate, however small a gradient is: norms may be further apart.
LOSS_TOLERANCE = {"float32": 2e-3, "bfloat16": 1e-2, "float16": 5e-3}
NORM_TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2, "float16": 3e-2}
# Around 0, as of GRPO's first steps, a difference counts as it is.
SMALLEST_LOSS = 0.1

MODES = ("none", "full", "selective", "every-2")
LORA = ("adapter.kind=lora", "adapter.rank=8", "optimizer.learning_rate=1e-2")


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """A run. `same_bits_as`: the case on the device whose bits it must have, as it only moves or repeats the same work.

    `attention`: of the device; the CPU computes with a mask.
    """

    name: str
    recipe: str = "texts"
    overrides: tuple[str, ...] = ()
    same_bits_as: str = ""
    attention: str | None = None
    is_tiny: bool = False  # whether `--tiny` has it


def memory_cases() -> Iterator[Case]:
    """What is kept, computed again, or moved to the host and back."""
    yield Case(name="plain", is_tiny=True)
    for mode in MODES[1:]:
        yield Case(
            name=mode,
            overrides=(f"train.activation_checkpointing={mode}",),
            same_bits_as="plain",
            is_tiny=mode == "selective",
        )
    for mode in MODES:
        yield Case(
            name=f"offloaded {mode}",
            overrides=(
                f"train.activation_checkpointing={mode}",
                "train.offload_activations=true",
            ),
            same_bits_as="plain",
            is_tiny=mode == "none",
        )


SAME_CASES = (
    *memory_cases(),
    Case(name="states offloaded", overrides=("optimizer.offload=true",)),
    Case(
        name="int8 states offloaded",
        overrides=("optimizer.offload=true", "optimizer.state_dtype=int8"),
        is_tiny=True,
    ),
    Case(name="int8 states", overrides=("optimizer.state_dtype=int8",)),
    Case(name="muon", overrides=("optimizer.kind=muon",)),
    Case(name="adafactor", overrides=("optimizer.kind=adafactor",)),
    Case(name="lora", overrides=LORA),
    Case(name="lora nf4", overrides=(*LORA, "quantize.kind=nf4"), is_tiny=True),
    Case(name="lora int8", overrides=(*LORA, "quantize.kind=int8")),
    Case(name="bfloat16", overrides=("train.precision=bfloat16",)),
    Case(name="float16", overrides=("train.precision=float16",)),
    Case(name="micro-batches", overrides=("train.micro_batch_size=8",)),
    Case(name="not deterministic", overrides=("train.deterministic=false",)),
    Case(name="dpo", recipe="pairs", is_tiny=True),
)


def attention_cases() -> Iterator[Case]:
    """Packed rows through each backend, in the precision that it takes. Some kernels refuse to be deterministic."""
    for name in ("blockwise", "math", "varlen", "flex", "triton"):
        overrides: tuple[str, ...] = ("train.deterministic=false",)
        if BACKENDS[name].float32 is not None:
            overrides += ("train.precision=bfloat16",)
        yield Case(name=f"attention {name}", overrides=overrides, attention=name, is_tiny=True)


def unavailable(case: Case, plan: RunPlan, device: str) -> str | None:
    """Why the device cannot run the case's attention; None where it can."""
    if case.attention is None:
        return None
    missing = missing_feature(
        case.attention,
        device_type=torch.device(device).type,
        packed=True,
        window=False,
        softcap=False,
        dropout=False,
        float32=plan.train.precision == "float32",
        torch=torch.__version__,
    )
    if missing is None and case.attention in ("triton", "flex") and find_spec("triton") is None:
        return "triton is not installed"
    return missing


def same_losses(job: PartJob) -> Iterator[Row]:
    """A row for each case."""
    runs = SmallRuns(job.folder, job.device)
    compared = _Compared(runs)
    cases = [case for case in (*SAME_CASES, *attention_cases()) if case.is_tiny or not job.tiny]
    yield from rows_of(job, [(case.name, partial(compared.row, case)) for case in cases])


@final
class _Compared:
    """Runs a case on both sides, and remembers what a later one must equal."""

    def __init__(self, runs: SmallRuns) -> None:
        self._runs = runs
        self._on_cpu: dict[tuple[str, ...], RunNumbers] = {}
        self._tensors: dict[str, Mapping[str, bytes]] = {}

    def row(self, case: Case) -> Row:
        plan = self._runs.plan(case.recipe, *case.overrides)
        reason = unavailable(case, plan, self._runs.device)
        if reason is not None:
            return Row(case=case.name, outcome="skipped", message=reason)
        device_plan = self._runs.on_device(plan, attention=case.attention)
        # What only moves or repeats work has one run on the CPU.
        key = (case.recipe,) if case.same_bits_as or case.name == "plain" else (case.name,)
        if key not in self._on_cpu:
            self._on_cpu[key] = self._runs.run(plan)
        on_device = self._runs.run(device_plan)
        numbers, problem = differences(self._on_cpu[key], on_device, plan.train.precision)
        self._tensors[case.name] = on_device.tensors if case.name == "plain" else {}
        if case.same_bits_as and self._tensors.get(case.same_bits_as):
            numbers["same_bits"] = on_device.tensors == self._tensors[case.same_bits_as]
            if not numbers["same_bits"] and not problem:
                problem = f"its weights are not those of {case.same_bits_as} on this device"
        return Row(
            case=case.name,
            outcome="wrong" if problem else "ok",
            message=problem,
            numbers=numbers,
        )


def differences(
    on_cpu: RunNumbers, on_device: RunNumbers, precision: str
) -> tuple[dict[str, Any], str]:
    """The largest relative differences of losses and gradient norms, and what is wrong with them; "" if nothing is."""
    loss_error = _largest_difference(on_cpu.losses, on_device.losses)
    norm_error = _largest_difference(on_cpu.grad_norms, on_device.grad_norms)
    problem = ""
    if not loss_error <= LOSS_TOLERANCE[precision]:
        problem = f"losses {_listed(on_device.losses)}, on the CPU {_listed(on_cpu.losses)}"
    elif not norm_error <= NORM_TOLERANCE[precision]:
        norms = _listed(on_device.grad_norms)
        problem = f"gradient norms {norms}, on the CPU {_listed(on_cpu.grad_norms)}"
    return {"loss_error": _finite(loss_error), "norm_error": _finite(norm_error)}, problem


def _largest_difference(expected: Mapping[int, float], measured: Mapping[int, float]) -> float:
    """Infinite where steps are missing or a number is NaN."""
    if expected.keys() != measured.keys():
        return math.inf
    errors = [
        abs(measured[step] - value) / max(abs(value), SMALLEST_LOSS)
        for step, value in expected.items()
    ]
    return max((error if error == error else math.inf for error in errors), default=math.inf)


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _listed(values: Mapping[int, float]) -> str:
    return " ".join(f"{value:.6g}" for value in values.values())


# Completions

POLICY_CASES = (
    Case(name="grpo", recipe="prompts", is_tiny=True),
    Case(
        name="rloo top_p",
        recipe="prompts",
        overrides=("objective.kind=rloo", "objective.top_p=0.9", "train.deterministic=false"),
    ),
    Case(
        name="ppo",
        recipe="prompts",
        overrides=("objective.kind=ppo", "objective.num_generations=1"),
    ),
)
# Random numbers of a completion are keyed, and equal on both devices: it differs only where a draw falls on a boundary
# that rounding moves, which a token meets once in a million. Both limits are chosen: a simulated device has all
# completions of the CPU, and log-probabilities within 5e-7 nats.
LEAST_EQUAL = 0.9
LOGP_TOLERANCE = 1e-2  # nats


def rollouts(job: PartJob) -> Iterator[Row]:
    """A row for each objective on completions."""
    runs = SmallRuns(job.folder, job.device)
    cases = [case for case in POLICY_CASES if case.is_tiny or not job.tiny]
    yield from rows_of(job, [(case.name, partial(_rollout_row, runs, case)) for case in cases])


def _rollout_row(runs: SmallRuns, case: Case) -> Row:
    plan = runs.plan(case.recipe, *case.overrides)
    on_cpu = runs.run(plan)
    on_device = runs.run(runs.on_device(plan))
    pairs = list(zip(on_cpu.completions, on_device.completions, strict=True))
    equal_pairs = [pair for pair in pairs if pair[0]["completion_ids"] == pair[1]["completion_ids"]]
    logp_error = max(
        (
            abs(one - other)
            for cpu_row, device_row in equal_pairs
            for one, other in zip(cpu_row["logps"], device_row["logps"], strict=True)
        ),
        default=math.inf,
    )
    numbers: dict[str, Any] = {
        "completions": len(pairs),
        "as_on_the_cpu": len(equal_pairs),
        "logp_error": _finite(logp_error),
    }
    problem = ""
    if len(equal_pairs) < LEAST_EQUAL * len(pairs):
        problem = f"{len(equal_pairs)} of {len(pairs)} completions are those of the CPU"
    elif not logp_error <= LOGP_TOLERANCE:
        problem = f"log-probabilities differ by up to {logp_error:.2g}"
    elif len(equal_pairs) == len(pairs):
        # With equal completions the updates must be equal, too.
        more_numbers, problem = differences(on_cpu, on_device, plan.train.precision)
        numbers |= more_numbers
    return Row(
        case=case.name, outcome="wrong" if problem else "ok", message=problem, numbers=numbers
    )
