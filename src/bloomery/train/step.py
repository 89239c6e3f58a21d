"""One optimizer step: gradient accumulation, loss scaling, clipping and the update."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bloomery.data.batch import Batch
from bloomery.data.order import mix
from bloomery.model.adapters.peft_methods import PeftAdapter
from bloomery.model.decoder import Decoder
from bloomery.model.io.parameters import is_split, local
from bloomery.parallel.gradients import all_reduce_gradients
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.plan.types import TrainPlan
from bloomery.train.diagnostics.step_health import HealthCheck
from bloomery.train.forward import forward, to_device
from bloomery.train.losses import LossParts, added
from bloomery.train.objectives import Objective
from bloomery.train.optim.average import WeightAverage
from bloomery.train.optim.build import OptimizersContainer


@dataclass(frozen=True)
class StepResult:
    """`loss`: per loss token, pair or response. `grad_norm`: before clipping. Either may be non-finite."""

    loss: float
    grad_norm: float
    # float16: finite loss, non-finite scaled gradients; the loss scale was lowered
    overflowed: bool = False
    loss_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # finite means over the step
    fused_backward: bool = False

    @property
    def taken(self) -> bool:
        """Whether every weight was updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def left(self) -> str:
        """How a step ended that was not taken."""
        halfway = self.fused_backward and math.isfinite(self.loss)
        return (
            "interrupted in backward, before the layers below the non-finite gradient"
            if halfway
            else "skipped"
        )


@dataclass
class LossScale:
    """The factor that keeps float16 gradients from underflow; rules and constants of torch.amp.GradScaler."""

    value: float = 2.0**16
    clean_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Halves after an overflow, doubles after 2,000 clean steps in a row; never below 1."""
        self.clean_steps = self.clean_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.clean_steps == 2000:
            self.value = self.value * 2
            self.clean_steps = 0


@dataclass
class ModelAndOptimizer:
    """Model, optimizer, loss scale and PEFT schedule: everything that a step updates."""

    model: Decoder
    optimizer: OptimizersContainer
    scale: LossScale | None  # float16 only
    health_check: HealthCheck | None = None  # measures the next update
    method: PeftAdapter | None = None  # a PEFT method with a schedule of its own
    average: WeightAverage | None = None
    # True outside a step: an update was interrupted, weights and states are inconsistent
    updating: bool = False
    mesh: Mesh = SINGLE_RANK


def compute_loss(
    model: Decoder, batch: Batch, objective: Objective, *, precision: str
) -> LossParts:
    """Forward of one micro-batch on the model's device."""
    return objective.loss(forward(model, batch, objective.head(batch), precision=precision), batch)


def train_step(
    model_and_optimizer: ModelAndOptimizer,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    plan: TrainPlan,
    lr_scale: float,
    position: int = 0,
) -> StepResult:
    """Take one step at `lr_scale` times the peak learning rate. A non-finite step changes neither weights nor states.

    The loss is divided by the count (loss tokens, pairs) of all micro-batches of all ranks, known before the first
    backward, so that gradient accumulation gives the gradient of one large batch. The host waits for the device once,
    for loss and norm; the update then runs while the host continues. `position`: the first sequence of the step, which
    keys dropout, so that no generator state is part of a run.
    """
    model = model_and_optimizer.model
    optimizer = model_and_optimizer.optimizer
    scale = model_and_optimizer.scale
    method = model_and_optimizer.method
    health_check = model_and_optimizer.health_check
    mesh = model_and_optimizer.mesh
    device = next(model.parameters()).device
    own_count = sum(objective.count(batch) for batch in batches)
    loss_tokens, count = mesh.all_reduce_sum(
        sum(float(batch.loss_mask.sum()) for batch in batches), own_count
    )
    count = max(1.0, count)
    if objective.before is not None:
        batches = objective.before(model, batches)
    factor = 1.0 if scale is None else scale.value
    total = torch.zeros((), dtype=torch.float32, device=device)
    sums = dict[str, Tensor]()
    fused_norm: Tensor | None = None  # computed by the fused optimizer, which frees the gradients
    for number, batch in enumerate(batches):
        seed = mix(plan.seed, position, number, mesh.data_rank) >> 1
        # torch.manual_seed formats a traceback per kind of absent GPU
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            torch.get_device_module(device).manual_seed_all(seed)
        parts = compute_loss(model, to_device(batch, device), objective, precision=plan.precision)
        scaled = parts.total * (factor / count)
        if optimizer.fused_backward:
            assert len(batches) == 1, "the plan refuses gradient accumulation with a fused backward"
            fused_norm = total.new_tensor(
                fused_step(model_and_optimizer, scaled, plan, factor, lr_scale)
            )
        else:
            scaled.backward()
        total += parts.total.detach()
        sums = added(sums, parts.metrics)
    if method is not None and (penalty := method.penalty()) is not None:
        # once per step, not part of the reported loss
        (penalty * (factor / mesh.data_world)).backward()
    all_reduce_gradients(optimizer.parameters, mesh)
    gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
    norm_now = global_norm(gradients, mesh) / factor if fused_norm is None else fused_norm
    total, sums = summed(total, sums, mesh)
    means = [some[0] / some[1] for some in sums.values()]
    loss, norm, *values = torch.stack([total / count, norm_now, *means]).tolist()
    overflowed = factor > 1 and math.isfinite(loss) and not math.isfinite(norm)
    metrics = {
        name: value for name, value in zip(sums, values, strict=True) if math.isfinite(value)
    }
    result = StepResult(loss, norm, overflowed, round(loss_tokens), metrics, fused_norm is not None)
    if result.taken and fused_norm is None:
        scale_gradients(
            [local(each) for each in gradients], clip_factor(norm, plan.max_grad_norm) / factor
        )
        model_and_optimizer.updating = True
        with nullcontext() if health_check is None else health_check.watching():
            optimizer.step(lr_scale)
        if method is not None:
            method.after_update()
        model_and_optimizer.updating = False
    if result.taken and model_and_optimizer.average is not None:
        model_and_optimizer.average.update()
    if scale is not None and math.isfinite(loss):
        scale.update(finite=result.taken)
    optimizer.zero_grad()
    return result


def fused_step(
    model_and_optimizer: ModelAndOptimizer,
    scaled: Tensor,
    plan: TrainPlan,
    factor: float,
    lr_scale: float,
) -> float:
    """Backward with the optimizer fused into it: the norm over all gradients, non-finite where it stopped halfway.

    A non-finite loss skips backward and returns NaN; the host waits for the device here.
    """
    if not math.isfinite(scaled.item()):
        return math.nan
    optimizer = model_and_optimizer.optimizer
    health_check = model_and_optimizer.health_check
    model_and_optimizer.updating = True
    with nullcontext() if health_check is None else health_check.watching(gradients=False):
        optimizer.begin_step(lr_scale, factor=factor, clip=plan.max_grad_norm)
        scaled.backward()
        norm = optimizer.finish_step()
    model_and_optimizer.updating = False
    return norm


def summed(total: Tensor, sums: dict[str, Tensor], mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and the sums of metrics over all ranks, in one reduction.

    Metrics come back in their shapes, in the dtype and on the device of the loss.
    """
    if mesh.world == 1:
        return total, sums
    flat = mesh.all_reduce(
        torch.cat([total.reshape(1), *(some.reshape(-1).to(total) for some in sums.values())])
    )
    parts = flat[1:].split([some.numel() for some in sums.values()]) if sums else ()
    return flat[0], {
        name: part.view_as(some) for (name, some), part in zip(sums.items(), parts, strict=True)
    }


def global_norm(gradients: Sequence[Tensor], mesh: Mesh = SINGLE_RANK) -> Tensor:
    """The Euclidean norm over all gradients, float32: a bfloat16 norm would have three digits.

    Of gradients in shards, this rank's rows and then those of the others; one that every rank has counts once.
    """
    exact = (
        {}
        if all(gradient.dtype == torch.float32 for gradient in gradients)
        else {"dtype": torch.float32}
    )
    norms = torch.stack(
        torch._foreach_norm([local(gradient) for gradient in gradients], 2, **exact)
    )
    if mesh.shard > 1:
        split = torch.tensor([is_split(gradient) for gradient in gradients], device=norms.device)
        norms = torch.stack(
            [
                mesh.norm_over_shards(torch.linalg.vector_norm(norms * split)),
                torch.linalg.vector_norm(norms * ~split),
            ]
        )
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def clip_factor(norm: float, clip: float | None) -> float:
    """The factor of torch.nn.utils.clip_grad_norm_."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """In place; a factor of 1 skips the pass over memory."""
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
