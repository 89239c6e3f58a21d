"""One optimizer step: the gradients of its micro-batches, loss scaling, clipping and the update."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from bloomery.core.device import seed_generators, sent
from bloomery.data.batch import Batch
from bloomery.data.order import mix
from bloomery.facts.limits import CPU_PIECE
from bloomery.infer.forward import forward_all, free_gathered, has_dropout, to_device
from bloomery.model.adapters.peft_methods import PeftAdapter
from bloomery.model.decoder import Backbone, Decoder
from bloomery.model.io.parameters import is_split, local
from bloomery.parallel.fsdp import reduce_between_replicas
from bloomery.parallel.gradients import all_reduce_gradients
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.pipeline import StageParameters
from bloomery.plan.pipeline import order
from bloomery.plan.types import TrainPlan
from bloomery.train.balance import Loads, StepBalance, step_balance
from bloomery.train.diagnostics.step_health import HealthCheck
from bloomery.train.objectives.losses import (
    LARGEST,
    LEAST,
    LossParts,
    joined_metrics,
    no_metric,
)
from bloomery.train.objectives.objective import Objective
from bloomery.train.optim.average import WeightAverage
from bloomery.train.optim.build import OptimizersContainer
from bloomery.train.optim.common import float32_norm, scale_gradients

LOADS = "loads"  # among the sums of metrics: those of `StepLoad`


@dataclass(frozen=True)
class StepResult:
    """`loss`: per loss token, pair or response. `grad_norm`: before clipping. Either may be non-finite."""

    loss: float
    grad_norm: float
    # In float16: the loss is finite and the scaled gradients are not, so that the loss scale was lowered.
    overflowed: bool = False
    loss_tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)  # finite means over the step
    # By layer with experts, where asked for: the load of each relative to an even one.
    expert_load: dict[int, list[float]] = field(default_factory=dict)
    fused_backward: bool = False

    @property
    def taken(self) -> bool:
        """Whether every weight was updated."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def ending(self) -> str:
        """How a step ended that was not taken."""
        # Fused into backward, the optimizer has updated the layers above the one with the non-finite gradient.
        if self.fused_backward and math.isfinite(self.loss):
            return "interrupted in backward, before the layers below the non-finite gradient"
        return "skipped"


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
    """Everything that a step updates, and how this rank takes part in it."""

    model: Decoder
    optimizer: OptimizersContainer
    loss_scale: LossScale | None  # float16 only
    health_check: HealthCheck | None = None  # measures the next update
    peft_adapter: PeftAdapter | None = None  # a PEFT method with a schedule of its own
    average: WeightAverage | None = None
    # True outside a step: an exception interrupted an update, weights and states are inconsistent.
    updating: bool = False
    mesh: Mesh = SINGLE_RANK
    # Which parameters of the model are on which stage of a pipeline; None: there is one stage.
    stage_parameters: StageParameters | None = None
    has_dropout: bool = field(init=False)

    def __post_init__(self) -> None:
        self.has_dropout = has_dropout(self.model)


@dataclass
class StepPasses:
    """The forward and the backward pass of a micro-batch, with what they need to know about the step."""

    model_and_optimizer: ModelAndOptimizer
    objective: Objective
    plan: TrainPlan
    position: int
    lr_scale: float
    scale_factor: float  # of float16 gradients; 1 otherwise
    num_targets: float  # of the whole step
    balance: StepBalance | None = None  # of the experts of a mixture
    # The norm over all gradients, measured by an optimizer that is fused into backward: it frees them as it goes.
    fused_norm: float | None = None

    @property
    def device(self) -> torch.device:
        return self.model_and_optimizer.model.device

    def forward(self, number: int, batch: Batch) -> LossParts:
        """The sums of the step's `number`-th micro-batch.

        Dropout is keyed by the run's seed, the step's first sequence, micro-batch, data rank and layer, so that no
        generator state is part of a run, and no mask depends on the stages of a pipeline.
        """
        return self.forward_all({number: batch})[0]

    def forward_all(self, batches: Mapping[int, Batch]) -> list[LossParts]:
        """The sums of some of the step's micro-batches, by number; every layer computes all before the next one."""
        all_parts = compute_losses(
            self.model_and_optimizer.model,
            [to_device(batch, self.device) for batch in batches.values()],
            self.objective,
            precision=self.plan.precision,
            counts_loads=self.balance is not None,
            begin=self._beginnings(batches),
        )
        if self.balance is not None:
            for parts in all_parts:
                self.balance.note(parts.loads)
        return all_parts

    def loads_of(self, batches: Mapping[int, Batch]) -> list[Loads]:
        """The loads of some of the step's micro-batches, as `forward_all` will have them; no head runs."""
        outputs = forward_all(
            self.model_and_optimizer.model,
            [to_device(batch, self.device) for batch in batches.values()],
            [_no_head] * len(batches),
            begin=self._beginnings(batches),
            precision=self.plan.precision,
            counts_loads=True,
        )
        return [output.loads for output in outputs]

    def _beginnings(self, numbers: Iterable[int]) -> list[Callable[[], None]]:
        return [partial(self._seed_dropout, number) for number in numbers]

    def _seed_dropout(self, number: int) -> None:
        model = self.model_and_optimizer.model
        data_rank = self.model_and_optimizer.mesh.data_rank
        key = mix(self.plan.seed, self.position, number, data_rank)
        self._seed_generators(key)
        if self.model_and_optimizer.has_dropout and isinstance(model.model, Backbone):
            model.model.seed_layer = lambda layer: self._seed_generators(mix(key, layer))

    def _seed_generators(self, key: int) -> None:
        seed = key >> 1  # a generator takes 63 bits
        seed_generators(self.device, seed)

    def backward(self, all_parts: Sequence[LossParts]) -> None:
        """Add the gradient of what these micro-batches have of the step's mean loss; with a fused optimizer, also
        update the weights.
        """
        scaled_losses = list(map(self._scaled_loss, all_parts))
        if self.model_and_optimizer.optimizer.fused_backward:
            assert self.fused_norm is None, "the plan refuses gradient accumulation with it"
            (scaled_loss,) = scaled_losses
            self.fused_norm = self._fused_backward(scaled_loss)
            return
        # A frozen language model has no gradient for texts without pictures.
        reaching_losses = [loss for loss in scaled_losses if loss.requires_grad]
        if reaching_losses:
            torch.autograd.backward(reaching_losses)

    def _scaled_loss(self, parts: LossParts) -> Tensor:
        scaled_loss = parts.total * (self.scale_factor / self.num_targets)
        # The losses of routers are no part of the reported loss.
        auxiliary = None if self.balance is None else self.balance.auxiliary(parts.loads)
        if auxiliary is not None:
            scaled_loss = scaled_loss + auxiliary * self.scale_factor
        return scaled_loss

    def _fused_backward(self, scaled_loss: Tensor) -> float:
        """Backward with the optimizer fused into it: the norm over all gradients, non-finite where it stopped halfway.

        A non-finite loss skips backward and returns NaN; the host waits for the device here.
        """
        if not math.isfinite(scaled_loss.item()):
            return math.nan
        optimizer = self.model_and_optimizer.optimizer
        health_check = self.model_and_optimizer.health_check
        self.model_and_optimizer.updating = True
        with nullcontext() if health_check is None else health_check.watching(gradients=False):
            optimizer.begin_step(
                self.lr_scale, factor=self.scale_factor, clip=self.plan.max_grad_norm
            )
            scaled_loss.backward()
            norm = optimizer.finish_step()
        self.model_and_optimizer.updating = False
        return norm


def _no_head(hidden_BTD: Tensor, output: nn.Linear, softcap: float | None) -> Tensor:
    """In place of a head, where the layers alone are asked."""
    del output, softcap
    return hidden_BTD.new_zeros(())


def compute_loss(
    model: Decoder,
    batch: Batch,
    objective: Objective,
    *,
    precision: str,
    counts_loads: bool = False,
) -> LossParts:
    """Forward of one micro-batch on the model's device.

    A stage without the head has no loss: its sums are zeros, and backward through `total` goes through its layers.
    """
    (parts,) = compute_losses(
        model, [batch], objective, precision=precision, counts_loads=counts_loads
    )
    return parts


def compute_losses(
    model: Decoder,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    precision: str,
    counts_loads: bool = False,
    begin: Sequence[Callable[[], None]] = (),
) -> list[LossParts]:
    """`compute_loss` of each: every layer computes all of them before the next one.

    `begin`: of each, called before it begins; none: nothing is called.
    """
    outputs = forward_all(
        model,
        batches,
        [objective.head(batch) for batch in batches],
        begin=begin,
        precision=precision,
        counts_loads=counts_loads,
    )
    if model.ends_here:
        return [
            objective.loss(output.head, batch)._replace(loads=output.loads)
            for output, batch in zip(outputs, batches, strict=True)
        ]
    # The loss of no scores at all has the names of the metrics, which every rank needs for their sum.
    mask_BT = batches[0].loss_mask
    no_scores = mask_BT.new_zeros((*objective.rows, *mask_BT.shape))
    zero = outputs[0].head.new_zeros(())
    metrics = {
        name: no_metric(name, zero) for name in objective.loss(no_scores, batches[0]).metrics
    }
    return [LossParts(output.head, zero, metrics, output.loads) for output in outputs]


def train_step(
    model_and_optimizer: ModelAndOptimizer,
    batches: Sequence[Batch],
    objective: Objective,
    *,
    plan: TrainPlan,
    lr_scale: float,
    position: int = 0,
    reports_experts: bool = False,
) -> StepResult:
    """Take one step at `lr_scale` times the peak learning rate.

    A non-finite step changes neither weights nor states, unless the optimizer is fused into backward: then those of
    the last layers (`StepResult.ending`). `position`: the first sequence of the step. `reports_experts`: the load of
    each expert in each layer. The host waits for the device once, for loss and norm; the update then runs while the
    host continues. An optimizer that is fused into backward makes it wait twice more: before backward, which updates
    weights, and for the norm after it.
    """
    model = model_and_optimizer.model
    optimizer = model_and_optimizer.optimizer
    loss_scale = model_and_optimizer.loss_scale
    peft_adapter = model_and_optimizer.peft_adapter
    mesh = model_and_optimizer.mesh

    # 1. Count the targets of the whole step (loss tokens, pairs), on all ranks. The loss of each micro-batch is divided
    # by this count before its backward: gradient accumulation then gives the gradient of one large batch. All stages
    # of a pipeline read the same batches: those of the last one count.
    counted_batches = batches if mesh.last_stage else ()
    loss_tokens, num_targets, num_tokens, num_micro_batches = mesh.all_reduce_sum(
        sum(float(batch.loss_mask.sum()) for batch in counted_batches),
        sum(objective.count(batch) for batch in counted_batches),
        sum(float((batch.documents >= 0).sum()) for batch in counted_batches),
        len(counted_batches),
    )
    num_targets = max(1.0, num_targets)  # every label may be masked: the loss is then 0

    # 2. Forward and backward of each micro-batch. An objective may need a pass over all of them first, without
    # gradients: reference scores, the KL term of KTO; so may the loss that evens the load of experts.
    if objective.before is not None:
        batches = objective.before(model, batches)
    scale_factor = 1.0 if loss_scale is None else loss_scale.value
    balance = step_balance(
        plan.router, model, mesh, num_tokens=num_tokens, num_micro_batches=round(num_micro_batches)
    )
    passes = StepPasses(
        model_and_optimizer,
        objective,
        plan,
        position=position,
        lr_scale=lr_scale,
        scale_factor=scale_factor,
        num_targets=num_targets,
        balance=balance,
    )
    if balance is not None and balance.counts_first(len(batches)):
        groups = groups_of(batches, plan.stream_micro_batches)
        balance.count([partial(passes.loads_of, group) for group in groups])
        free_gathered(model)
    total, metric_sums = run_micro_batches(batches, passes)
    if peft_adapter is not None and (penalty := peft_adapter.penalty()) is not None:
        # Once per step and no part of the reported loss; the sum over data ranks makes it whole.
        (penalty * (scale_factor / mesh.data_world)).backward()

    # 3. Gradients: sum them over the ranks and measure them. A fused optimizer, which the plan allows on one device and
    # without PEFT methods, has measured and used its own.
    if model.weight_stream is not None:
        model.weight_stream.settle()
    all_reduce_gradients(optimizer.parameters, mesh)
    stage_parameters = model_and_optimizer.stage_parameters
    if stage_parameters is not None:
        stage_parameters.all_reduce_tied(optimizer.named_parameters, mesh)
    gradients = {
        name: parameter.grad
        for name, parameter in optimizer.named_parameters.items()
        if parameter.grad is not None
    }
    if passes.fused_norm is None:
        norm = global_norm(gradients, mesh, stage_parameters) / scale_factor
    else:  # the host has it, as a float32 norm like any other
        norm = torch.tensor(passes.fused_norm, dtype=torch.float32)
    if balance is not None:
        metric_sums |= {LOADS: balance.sums}
    total, metric_sums = all_reduce_losses(total, metric_sums, mesh)
    load = None if balance is None else balance.load_of(metric_sums.pop(LOADS))

    # The one time that the host waits for the device. A metric is a tensor of its sum and its count; without any count
    # (in KTO: no desirable response) its mean is NaN, and it is left out.
    metric_means = {name: sums[0] / sums[1] for name, sums in metric_sums.items()}
    details = total.new_zeros(0)
    if balance is not None and load is not None:
        metric_means |= load.metrics(has_z_loss=balance.plan.z_loss > 0, pooled=balance.plan.pooled)
        details = load.ratios_LE.flatten() if reports_experts else details
    on_device = torch.cat([torch.stack([total / num_targets, *metric_means.values()]), details])
    if norm.device == total.device:
        *values, grad_norm = torch.cat([on_device, norm.reshape(1)]).tolist()
    else:
        values = on_device.tolist()
        grad_norm = norm.item()
    loss, *metrics = values[: 1 + len(metric_means)]
    result = StepResult(
        loss,
        grad_norm,
        overflowed=scale_factor > 1 and math.isfinite(loss) and not math.isfinite(grad_norm),
        loss_tokens=round(loss_tokens),
        metrics={
            name: metric
            for name, metric in zip(metric_means, metrics, strict=True)
            if math.isfinite(metric)
        },
        expert_load={} if balance is None else balance.by_layer(values[1 + len(metric_means) :]),
        fused_backward=optimizer.fused_backward,
    )

    # 4. Clip and update, unless the step is not finite. `updating` stays True where the update is interrupted.
    if result.taken and not optimizer.fused_backward:
        factor = clip_factor(grad_norm, plan.max_grad_norm) / scale_factor
        if peft_adapter is not None:  # it reads the gradients after the update
            scale_gradients([local(gradient) for gradient in gradients.values()], factor)
            factor = 1.0
        health_check = model_and_optimizer.health_check
        model_and_optimizer.updating = True
        with nullcontext() if health_check is None else health_check.watching():
            optimizer.step(lr_scale, gradient_factor=factor)
        if peft_adapter is not None:
            peft_adapter.after_update()
        model_and_optimizer.updating = False
    if result.taken and balance is not None and load is not None and balance.plan.bias_update:
        balance.update_biases(model, load)
    if result.taken and model.weight_stream is not None:
        model.weight_stream.weights_changed()
    if result.taken and model_and_optimizer.average is not None:
        model_and_optimizer.average.update()

    # 5. The loss scale follows the gradients; a loss that is not finite itself says nothing about them.
    if loss_scale is not None and math.isfinite(loss):
        loss_scale.update(finite=result.taken)
    optimizer.zero_grad()
    return result


def run_micro_batches(
    batches: Sequence[Batch], passes: StepPasses
) -> tuple[Tensor, dict[str, Tensor]]:
    """All passes of a step on this rank: the summed loss and the sums of metrics; gradients are in the parameters.

    One device takes one micro-batch after the other, so that the activations of one are in memory; a stage of a
    pipeline takes them in the order of its schedule. Where weights stream, groups of them share each load of a layer.
    """
    if passes.plan.stream_micro_batches > 1:
        return _run_groups(groups_of(batches, passes.plan.stream_micro_batches), passes)
    mesh = passes.model_and_optimizer.mesh
    backbone = passes.model_and_optimizer.model.model
    actions = order(
        passes.plan.pipeline_schedule,
        stages=mesh.stages,
        stage=mesh.stage,
        micro_batches=len(batches),
        chunks=passes.plan.pipeline_chunks,
    )

    total = torch.zeros((), dtype=torch.float32, device=passes.device)
    metric_sums = dict[str, Tensor]()
    in_flight = dict[tuple[int, int], LossParts]()
    last_backwards = {action.chunk: action for action in actions if not action.is_forward}
    for action in actions:
        key = (action.chunk, action.micro_batch)
        if not action.is_forward:
            # Replicas of shards sum their gradients once per step, in the last backward of each group of layers.
            is_last = action is last_backwards[action.chunk]
            reduce_between_replicas(passes.model_and_optimizer.model, in_next_backward=is_last)
            passes.backward([in_flight.pop(key)])
            continue
        # Of several groups of layers a forward in training computes one; any other forward computes all of them.
        if isinstance(backbone, Backbone) and passes.plan.pipeline_chunks > 1:
            backbone.group = action.chunk
        parts = passes.forward(action.micro_batch, batches[action.micro_batch])
        total += parts.total.detach()
        metric_sums = joined_metrics(metric_sums, parts.metrics)
        in_flight[key] = parts
    if isinstance(backbone, Backbone) and backbone.link is not None:
        backbone.group = None
        backbone.link.settle()
    return total, metric_sums


def groups_of(batches: Sequence[Batch], size: int) -> list[dict[int, Batch]]:
    """The micro-batches of a step by number, in groups of at most `size`."""
    numbered = list(enumerate(batches))
    return [dict(numbered[start : start + size]) for start in range(0, len(numbered), size)]


def _run_groups(
    groups: Sequence[Mapping[int, Batch]], passes: StepPasses
) -> tuple[Tensor, dict[str, Tensor]]:
    """`run_micro_batches`: one backward for all of a group, the next group after it."""
    total = torch.zeros((), dtype=torch.float32, device=passes.device)
    metric_sums = dict[str, Tensor]()
    for group in groups:
        all_parts = passes.forward_all(group)
        for parts in all_parts:
            total += parts.total.detach()
            metric_sums = joined_metrics(metric_sums, parts.metrics)
        passes.backward(all_parts)
    return total, metric_sums


def all_reduce_losses(
    total: Tensor, metric_sums: dict[str, Tensor], mesh: Mesh
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and the sums of metrics over all ranks, in one reduction; metrics in the dtype of the loss."""
    if mesh.world == 1:
        return total, metric_sums
    extremes = {
        name: metric for name, metric in metric_sums.items() if name.endswith((LARGEST, LEAST))
    }
    metric_sums = {name: metric for name, metric in metric_sums.items() if name not in extremes}
    flat_metrics = [metric_sum.reshape(-1).to(total) for metric_sum in metric_sums.values()]
    reduced_total, *reduced_metrics = mesh.all_reduce(
        torch.cat([total.reshape(1), *flat_metrics])
    ).split([1, *(len(flat) for flat in flat_metrics)])
    return reduced_total.squeeze(0), {
        name: reduced.view_as(metric_sum)
        for (name, metric_sum), reduced in zip(metric_sums.items(), reduced_metrics, strict=True)
    } | extremes_of_all_ranks(extremes, mesh)


def extremes_of_all_ranks(extremes: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """The metrics that are the largest or the least of a step. The host waits for the device where there are any."""
    if not extremes:
        return {}
    signs = [-1.0 if name.endswith(LEAST) else 1.0 for name in extremes]
    values = torch.stack([metric[0].double() for metric in extremes.values()]).tolist()
    signed_extremes = [sign * value for sign, value in zip(signs, values, strict=True)]
    largest = mesh.all_reduce_max(*signed_extremes)
    return {
        name: sent(torch.tensor([sign * value, 1.0], dtype=metric.dtype), metric.device)
        for (name, metric), sign, value in zip(extremes.items(), signs, largest, strict=True)
    }


def global_norm(
    gradients: Mapping[str, Tensor],
    mesh: Mesh = SINGLE_RANK,
    stage_parameters: StageParameters | None = None,
) -> Tensor:
    """The Euclidean norm over all gradients, computed in float32: a bfloat16 norm would have three digits."""
    local_gradients = [local(gradient) for gradient in gradients.values()]
    # A stage of a pipeline whose weights are all frozen has none.
    norms = torch.zeros(0, device=mesh.device)
    if local_gradients:
        norms = torch.stack(_float32_norms(local_gradients))
    if mesh.holders > 1 and local_gradients:
        # A gradient in shards is the rows of all ranks; one that every rank has in full counts once.
        are_rows = sent(
            torch.tensor([is_split(gradient) for gradient in gradients.values()]), norms.device
        )
        if stage_parameters is None:
            norm_of_rows = mesh.norm_over_shards(torch.linalg.vector_norm(norms * are_rows))
            norm_of_full = torch.linalg.vector_norm(norms * ~are_rows)
            norms = torch.stack([norm_of_rows, norm_of_full])
        else:
            norms = torch.where(are_rows, mesh.norm_over_shards(norms * are_rows), norms)
    if stage_parameters is not None:
        norms = stage_parameters.norms_of_all_stages(list(gradients), norms, mesh)
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def _float32_norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The Euclidean norm of each, in float32."""
    # One sum of float32 over all of a matrix is off by half a percent at 67 million values on a CPU. It also
    # converts other dtypes by a copy of all. Pieces end both.
    if all(tensor.device.type == "cpu" for tensor in tensors):
        piece = CPU_PIECE * torch.get_num_threads()
        return [float32_norm(tensor, piece) for tensor in tensors]
    all_float32 = all(tensor.dtype == torch.float32 for tensor in tensors)
    dtype = {} if all_float32 else {"dtype": torch.float32}
    return list(torch._foreach_norm(list(tensors), 2, **dtype))


def clip_factor(norm: float, clip: float | None) -> float:
    """The factor of torch.nn.utils.clip_grad_norm_."""
    return 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
