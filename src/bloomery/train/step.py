"""One optimizer step: micro-batches, one division by the count of the whole step, one look at whether it is finite."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bloomery.data.loading.loader import Batch
from bloomery.model.adapters.peft_methods import PeftAdapter
from bloomery.model.decoder import Decoder
from bloomery.plan.types import TrainPlan
from bloomery.train.diagnostics.step_health import HealthCheck
from bloomery.train.forward import forward, to_device
from bloomery.train.objectives.build import Objective
from bloomery.train.objectives.losses import LossParts, added
from bloomery.train.optim.build import OptimizersContainer


@dataclass(frozen=True)
class StepResult:
    """`loss` is per learned token, pair or answer, `grad_norm` the norm before clipping; as computed, finite or not."""

    loss: float
    grad_norm: float
    overflowed: bool = False  # float16: the loss is finite, its scaled gradients were not; the scale has been lowered
    loss_tokens: int = 0  # labels that counted
    metrics: dict[str, float] = field(default_factory=dict)  # means over the step, those that are finite
    fused_backward: bool = False  # the optimizer was

    @property
    def taken(self) -> bool:
        """Whether the weights moved, all of them."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def left(self) -> str:
        """What became of a step that was not taken."""
        halfway = self.fused_backward and math.isfinite(self.loss)
        return "cut short in backward: no weight below the bad gradient moved" if halfway else "skipped"


@dataclass
class LossScale:
    """The factor that lifts float16 gradients out of underflow; the rules and numbers of torch.amp.GradScaler."""

    value: float = 2.0**16
    clean_steps: int = 0

    def update(self, *, finite: bool) -> None:
        """Halves after an overflow, doubles after 2,000 clean steps in a row; never below 1."""
        self.clean_steps = self.clean_steps + 1 if finite else 0
        if not finite:
            self.value = max(1.0, self.value / 2)
        elif self.clean_steps == 2000:
            self.value, self.clean_steps = self.value * 2, 0


@dataclass
class ModelAndOptimizer:
    """What a step changes."""

    model: Decoder
    optimizer: OptimizersContainer
    scale: LossScale | None  # float16 alone
    health_check: HealthCheck | None = None  # looks at the next update
    method: PeftAdapter | None = None  # of PEFT, whose schedule follows the updates
    updating: bool = False  # True outside a step: an update was cut short, and weights and states do not fit together


def compute_loss(model: Decoder, batch: Batch, objective: Objective, *, precision: str) -> LossParts:
    """Forward of one micro-batch on the model's device."""
    return objective.loss(forward(model, batch, objective.head(batch), precision=precision), batch)


def train_step(
    model_and_optimizer: ModelAndOptimizer,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    plan: TrainPlan,
    lr_scale: float,
) -> StepResult:
    """Take one step at `lr_scale` times the peak learning rate. A non-finite step changes neither weights nor states.

    The count (of learned tokens, of pairs) is that of all micro-batches together, known before the first backward, so
    that accumulation gives the gradient of one large batch. The host waits for the device once: loss and norm decide
    whether the step is taken, and what the optimizer then does runs while the host goes on.
    """
    device = next(model_and_optimizer.model.parameters()).device
    loss_tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
    count = max(1.0, sum(objective.count(batch) for batch in batches))
    if objective.before is not None:
        batches = objective.before(model_and_optimizer.model, batches)
    factor = model_and_optimizer.scale.value if model_and_optimizer.scale is not None else 1.0
    total, sums = torch.zeros((), dtype=torch.float32, device=device), dict[str, Tensor]()
    inside: Tensor | None = None  # the norm that an optimizer in backward saw
    for batch in batches:
        parts = compute_loss(model_and_optimizer.model, to_device(batch, device), objective, precision=plan.precision)
        scaled = parts.total * (factor / count)
        if model_and_optimizer.optimizer.fused_backward:
            assert len(batches) == 1, "the plan refuses accumulation with an optimizer in backward"
            norm_inside = fused_backward_step(
                model_and_optimizer, scaled, factor=factor, clip=plan.max_grad_norm, lr_scale=lr_scale
            )
            inside = total.new_tensor(norm_inside)
        else:
            scaled.backward()
        total += parts.total.detach()
        sums = added(sums, parts.metrics)
    if model_and_optimizer.method is not None and (penalty := model_and_optimizer.method.penalty()) is not None:
        (penalty * factor).backward()  # once a step, beside the reported loss
    gradients = [p.grad for p in model_and_optimizer.optimizer.parameters if p.grad is not None]
    means = [some[0] / some[1] for some in sums.values()]
    loss, norm, *told = torch.stack([total / count, norm_of(gradients, factor, inside), *means]).tolist()
    overflowed = factor > 1 and math.isfinite(loss) and not math.isfinite(norm)
    metrics = {name: value for name, value in zip(sums, told, strict=True) if math.isfinite(value)}
    result = StepResult(loss, norm, overflowed, round(loss_tokens), metrics, inside is not None)
    if result.taken and inside is None:
        scale_gradients(gradients, clip_factor(norm, plan.max_grad_norm) / factor)
        model_and_optimizer.updating = True
        with nullcontext() if model_and_optimizer.health_check is None else model_and_optimizer.health_check.watching():
            model_and_optimizer.optimizer.step(lr_scale)
        if model_and_optimizer.method is not None:
            model_and_optimizer.method.after_update()
        model_and_optimizer.updating = False
    if model_and_optimizer.scale is not None and math.isfinite(loss):
        model_and_optimizer.scale.update(finite=result.taken)
    model_and_optimizer.optimizer.zero_grad()
    return result


def fused_backward_step(
    model_and_optimizer: ModelAndOptimizer, scaled: Tensor, *, factor: float, clip: float | None, lr_scale: float
) -> float:
    """Backward that updates as it goes: the norm over all gradients, not finite where it stopped half-way.

    From a loss that is not finite (NaN is returned) nothing goes backward: the host waits here to know it.
    """
    if not math.isfinite(scaled.item()):
        return math.nan
    model_and_optimizer.updating = True
    with (
        nullcontext()
        if model_and_optimizer.health_check is None
        else model_and_optimizer.health_check.watching(gradients=False)
    ):
        model_and_optimizer.optimizer.begin_step(lr_scale, factor=factor, clip=clip)
        scaled.backward()
        norm = model_and_optimizer.optimizer.finish_step()
    model_and_optimizer.updating = False
    return norm


def norm_of(gradients: Sequence[Tensor], factor: float, inside: Tensor | None) -> Tensor:
    """Without the loss scale; `inside` where an optimizer in backward has seen them, and freed them."""
    return global_norm(gradients) / factor if inside is None else inside


def global_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The Euclidean norm over all gradients, float32: a bfloat16 norm would have three digits."""
    gradients = list(gradients)
    # Said only where it changes something: PyTorch 2.15 cannot place a dtype when gradients are sharded.
    exact = {} if all(gradient.dtype == torch.float32 for gradient in gradients) else {"dtype": torch.float32}
    norms = torch._foreach_norm(gradients, 2, **exact)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_factor(norm: float, clip: float | None) -> float:
    """torch.nn.utils.clip_grad_norm_'s factor."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))


def scale_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """In place; a pass over memory is spared when nothing changes."""
    if factor != 1.0:
        torch._foreach_mul_(list(gradients), factor)
