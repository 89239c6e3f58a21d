"""Before the first step of a run: does the device of each rank compute right? One answer for all ranks.

The run's attention kernels are compared on every device, and a whole step on a GPU, once for its settings.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from bloomery.check.attention import check_attention
from bloomery.check.updates import has_formula
from bloomery.check.verdict import DeviceVerdict, judge
from bloomery.core.device import is_accelerator
from bloomery.core.errors import UserError
from bloomery.facts.config import ModelConfig
from bloomery.hardware.machine import read_machine
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.monitor.events import Emit, Phase, StepChecked, Warned
from bloomery.parallel.environment import hosts_at_fault, without_host
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import OptimizerPlan, RunPlan, TrainPlan
from bloomery.train.failures import Unsound
from bloomery.train.kernels import build_kernels, settle_tiles
from bloomery.train.process import set_up_process
from bloomery.train.recover import plan_without_kernel


class WrongNumbers(UserError):
    """The device computes something else than the CPU, in a part for which no safer kernel can be taken unasked."""


def is_checked(device: str, config: ModelConfig) -> bool:
    """Whether a step on the device is: on a GPU. A CPU that is compared with itself gives no news.

    Layers of transformers are compared with transformers' own forward instead (`model.transformers_checks`).
    """
    return is_accelerator(device) and config.transformers_backend is None


@final
@dataclass(frozen=True)
class CheckedPlan:
    """The plan that a run trains with. `build_seconds`: what compiling its C++ took in this process."""

    plan: RunPlan
    build_seconds: float


def checked_plan(
    plan: RunPlan,
    run_dir: Path,
    emit: Emit,
    mesh: Mesh = SINGLE_RANK,
    *,
    resumes: bool,
    check_step: bool = True,
) -> CheckedPlan:
    """Set up this process, and check that its device computes right with the plan, before a model takes its memory.

    Where an attention kernel fails or is wrong that the recipe does not ask for, the plan becomes one with blockwise
    attention, and is stored. `check_step`: compare a step on a GPU with the CPU, where that was not done yet; what rank
    0 says counts. Raises Unsound, KernelUnusable, WrongNumbers.
    """
    build_seconds = 0.0
    while True:
        set_up_process(plan.train, memory_limit=plan.memory_limit_of(mesh.rank))
        build_seconds += build_kernels(plan.model)
        try:
            settle_tiles(plan.model, plan.train, plan.data, run_dir, mesh, emit, resumes=resumes)
            check_step_of_ranks(plan, run_dir, emit, mesh, check_step=check_step)
            check_attention(plan.model, plan.train, sequence_length=plan.data.sequence_length)
        except (KernelFailed, Unsound) as error:
            plan = plan_without_kernel(plan, error, run_dir, emit, mesh)
        else:
            return CheckedPlan(plan, build_seconds)


def check_step_of_ranks(
    plan: RunPlan, run_dir: Path, emit: Emit, mesh: Mesh = SINGLE_RANK, *, check_step: bool = True
) -> None:
    """Compare a step on the device of each rank with the CPU, unless one like it was with these settings.

    All ranks end alike. Raises Unsound where attention is at fault, WrongNumbers for other parts.
    """
    if not mesh.all_gather_json(check_step and is_checked(plan.train.device, plan.model.config))[0]:
        return
    machine_file = run_dir / "machine.json"
    machine = read_machine(machine_file) if machine_file.is_file() else None
    own_verdict = judge(plan, machine, begins=lambda: emit(Phase(name="check")))
    verdicts = [DeviceVerdict(**entry) for entry in mesh.all_gather_json(asdict(own_verdict))]

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
            not_compared=not_compared(plan.optimizer),
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
    warn_of_bits(plan.train, verdicts, emit)


def not_compared(optimizer: OptimizerPlan) -> str:
    """What of a step the check does not compare; "" where it compares everything."""
    return "" if has_formula(optimizer) else f"the updates of optimizer.kind={optimizer.kind}"


def warn_of_bits(train: TrainPlan, verdicts: list[DeviceVerdict], emit: Emit) -> None:
    """Names a device that computes other bits at the second time: a warning, or a refusal of a deterministic run."""
    verdict = next((verdict for verdict in verdicts if verdict.unrepeatable), None)
    if verdict is None:
        return
    problem = f"{verdict.device} gives different bits when it computes {verdict.unrepeatable} twice"
    if train.deterministic:
        raise WrongNumbers(
            problem,
            where="train.deterministic=true",
            fix="set train.attention=blockwise or train.compile=false; or train.deterministic=false",
        )
    emit(Warned(reason=f"{problem}: a repeated or resumed run will differ in its last digits"))
