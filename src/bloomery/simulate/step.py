"""Two steps of a plan's training code on fake tensors, and the live tensors at the peak of the second.

Each stage of a pipeline runs alone: forward of its micro-batches until as many are in flight as stages follow, then
backward and forward in turn (1F1B; Narayanan et al., arXiv:2104.04473). Tensors from the neighboring stages are new
tensors of the residual stream; sent ones are freed.

The tensors of a step say "cpu", whatever device it stands for. Where code or the size of its pieces depends on the
type of a device, the simulation hands in what that device has: operators of attention, norms and scores
(`simulate.kernels`), and the optimizer's `device_type`.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.data.batch import Batch
from bloomery.model.attention.support import FLASH_LIKE
from bloomery.model.config import ModelConfig, Stage
from bloomery.model.decoder import Block, Decoder
from bloomery.model.norms import RMSNorm, torch_rms_norm
from bloomery.parallel.apply import apply
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import SINGLE_RANK, Mesh
from bloomery.parallel.stage import cut, stage_of
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.estimate.stages import kinds_of_stages
from bloomery.plan.types import RunPlan
from bloomery.simulate.graphs import compile_blocks
from bloomery.simulate.kernels import FakeResults, GpuFunctions, flash, score_operators
from bloomery.simulate.tracker import MemoryTracker
from bloomery.train.distillation import meta_teacher
from bloomery.train.forward import forward
from bloomery.train.objectives import build_objective, with_text_structure
from bloomery.train.optim.average import average_of
from bloomery.train.optim.build import build_optimizer
from bloomery.train.state import empty_model
from bloomery.train.step import (
    LossScale,
    ModelAndOptimizer,
    clip_factor,
    global_norm,
    scale_gradients,
    train_step,
)

OnProgress = Callable[[str], None]


def simulated_step(
    plan: RunPlan,
    *,
    fused: bool,
    split: MeshSplit = ONE_DEVICE,
    on_progress: OnProgress = lambda _text: None,
) -> dict[str, float]:
    """Bytes by part at the peak of the second step; `fused`: the plan's GPU has fused attention kernels.

    Two micro-batches stand for any number of them: from the second one on gradients are added to gradients. The first
    step makes the optimizer's states, for which one is enough.
    """
    mesh = _fake_mesh(split) if split.shard > 1 else None
    device_type = _device_type(plan)
    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, mesh=mesh, fused=fused)
        batches = [_batch(plan) for _ in range(min(2, plan.train.accumulation))]
        teacher = meta_teacher(plan) if plan.objective.spec.extra_forwards else None
        tracker.call("weights", [] if teacher is None else weights(teacher))
        tracker.call("inputs", [tensor for batch in batches for tensor in batch.tensors()])
        if teacher is not None:
            _hand_in_norms(teacher, device_type)
        objective = build_objective(
            plan,
            lambda _: teacher or meta_teacher(plan),
            operators=score_operators(tracker, device_type),
        )

        def step(count: int) -> None:
            train_step(
                model_and_optimizer, batches[:count], objective, plan=plan.train, lr_scale=1.0
            )

        return _peak(plan, model_and_optimizer, tracker, step, len(batches), on_progress)


@dataclass(frozen=True)
class StagePosition:
    """Which of so many stages."""

    index: int
    stages: int

    @property
    def ahead(self) -> int:
        """Micro-batches that wait for their backward while one more goes forward."""
        return self.stages - self.index - 1

    def stage(self, config: ModelConfig) -> Stage:
        """The part of the decoder that is here, with as many layers as the fullest stage has."""
        stage = stage_of(config, self.index, self.stages)
        most_layers = math.ceil(config.num_layers / self.stages)
        first = min(stage.layers.start, config.num_layers - most_layers)
        return replace(stage, layers=range(first, first + most_layers))

    def under_way(self, plan: RunPlan) -> int:
        """Micro-batches that the stage holds at most."""
        return min(self.ahead + 1, plan.train.accumulation)


def stage_positions(stages: int) -> list[StagePosition]:
    """One of each kind."""
    return [StagePosition(index, stages) for index in kinds_of_stages(stages)]


def simulated_stage(
    plan: RunPlan,
    position: StagePosition,
    *,
    fused: bool,
    on_progress: OnProgress = lambda _text: None,
) -> dict[str, float]:
    """Bytes by part at the peak of the stage's second step; `fused` as in `simulated_step`.

    One micro-batch after the first backward stands for all that follow: from then on gradients are added to gradients.
    """
    last = position.ahead == 0

    def sent() -> Tensor:
        shape = (
            plan.train.micro_batch_size,
            plan.data.sequence_length,
            plan.model.config.hidden_size,
        )
        return torch.empty(shape, dtype=next(model_and_optimizer.model.parameters()).dtype)

    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, position=position, fused=fused)
        objective = build_objective(
            plan, meta_teacher, operators=score_operators(tracker, _device_type(plan))
        )
        scale = model_and_optimizer.loss_scale
        factor = 1.0 if scale is None else scale.value

        def ahead() -> Tensor | GradientEdge:
            batch = _batch(plan)
            output = forward(
                model_and_optimizer.model,
                batch,
                objective.head(batch),
                precision=plan.train.precision,
                hidden_BTD=sent().requires_grad_() if position.index else None,
            )
            if not last:
                return get_gradient_edge(output.head)
            return objective.loss(output.head, batch).total * factor

        def step(count: int) -> None:
            under_way = deque[Tensor | GradientEdge]()
            for number in range(count + position.ahead):
                if number < count:
                    under_way.append(ahead())
                if number >= position.ahead and under_way:
                    torch.autograd.backward(under_way.popleft(), None if last else sent())
            gradients = list(tracker.gradients())
            norm = float(global_norm(gradients) / factor)
            scale_gradients(gradients, clip_factor(norm, plan.train.max_grad_norm) / factor)
            model_and_optimizer.optimizer.step(1.0)
            model_and_optimizer.optimizer.zero_grad()

        return _peak(
            plan,
            model_and_optimizer,
            tracker,
            step,
            min(position.ahead + 2, plan.train.accumulation),
            on_progress,
            prefix=f"stage {position.index + 1} of {position.stages}, ",
        )


@contextmanager
def _fake_tensors(plan: RunPlan) -> Iterator[MemoryTracker]:
    functions = nullcontext() if _device_type(plan) == "cpu" else GpuFunctions()
    with FakeTensorMode(allow_non_fake_inputs=True), functions:
        yield MemoryTracker()


def _device_type(plan: RunPlan) -> str:
    """Of the device that the step stands for."""
    return "cpu" if plan.train.device == "cpu" else "cuda"


def _hand_in_norms(model: Decoder, device_type: str) -> None:
    for module in model.modules() if device_type != "cpu" else ():
        if isinstance(module, RMSNorm):
            module.operator = torch_rms_norm


def _peak(
    plan: RunPlan,
    model_and_optimizer: ModelAndOptimizer,
    tracker: MemoryTracker,
    step: Callable[[int], None],
    num_micro_batches: int,
    on_progress: OnProgress,
    prefix: str = "",
) -> dict[str, float]:
    """Of a second step of so many micro-batches, after a first of one."""
    for number, count in (("first", 1), ("second", num_micro_batches)):
        on_progress(f"{prefix}the {number} of two steps")
        tracker.forget_peak()
        with tracker, FakeResults(tracker, _device_type(plan)):
            step(count)
        tracker.call("optimizer", _states(model_and_optimizer))
    # Offloaded states are in the host's memory, which a simulation of a device does not count.
    offloaded = {"optimizer"} if plan.train.device != "cpu" and plan.optimizer.offload else set()
    return {kind: 0.0 if kind in offloaded else size for kind, size in tracker.peak.items()}


def _model_and_optimizer(
    plan: RunPlan,
    tracker: MemoryTracker,
    *,
    fused: bool,
    mesh: DeviceMesh | None = None,
    position: StagePosition | None = None,
) -> ModelAndOptimizer:
    """As `train.state.build_state`, with fake tensors; a compiled block is its graphs, run op by op."""
    model = empty_model(plan)
    if position is not None:
        cut(model, position.stage(plan.model.config))
    train = plan.train
    attention = plan.model.attention

    # Fake tensors take the place of meta ones; `to_empty` would swap tensors, which fake ones refuse.
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            like = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(like, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    model.tie()

    # Kernels of a GPU stand in for those of the CPU.
    _hand_in_norms(model, _device_type(plan))
    blocks = [block for block in model.model.layers if isinstance(block, Block)]
    for block in blocks if train.device != "cpu" else ():
        if attention in FLASH_LIKE and fused:
            block.self_attn.backend = flash
        elif attention in FLASH_LIKE | {"mask"}:
            block.self_attn.backend = "math"
        block.forward = GpuFunctions.around(block.forward)  # type: ignore[method-assign]  # a seam of nn.Module

    # Compilation is simulated by graphs, and offloaded activations are not: they would need copies.
    if train.compile:
        compile_blocks(blocks, tracker)
    apply(model, train.model_copy(update={"compile": False, "offload_activations": False}))
    ranks = SINGLE_RANK
    if mesh is not None:
        apply_fsdp(model, train, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        ranks = Mesh(replicate=mesh.size() // num_shards, shard=num_shards, device_mesh=mesh)
    optimizer = build_optimizer(model, plan.optimizer, mesh=ranks, device_type=_device_type(plan))
    tracker.gradients = lambda: [p.grad for p in optimizer.parameters if p.grad is not None]
    tracker.call("weights", weights(model))
    scale = LossScale() if train.precision == "float16" else None
    return ModelAndOptimizer(model, optimizer, scale, average=average_of(model, train.ema_decay))


def _fake_mesh(split: MeshSplit) -> DeviceMesh:
    """A fake process group, this process its first rank; created outside FakeTensorMode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=split.replicate * split.shard
    )
    if split.replicate == 1:
        return init_device_mesh("cpu", (split.shard,))
    return init_device_mesh(
        "cpu", (split.replicate, split.shard), mesh_dim_names=("replicate", "shard")
    )


def _batch(plan: RunPlan) -> Batch:
    """A micro-batch."""
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    numbers = [torch.empty(shape, dtype=torch.int64) for _ in range(4)]
    return with_text_structure(
        Batch(numbers[0], numbers[1], torch.empty(shape), numbers[2], numbers[3]), plan
    )


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Quantized weights are buffers, and so are the initial matrices of PiSSA."""
    yield from model.parameters()
    yield from model.buffers()


def _states(model_and_optimizer: ModelAndOptimizer) -> Iterator[Tensor]:
    """Everything that the optimizer keeps from step to step, and the average of the weights."""
    if model_and_optimizer.average is not None:
        yield from model_and_optimizer.average.tensors.values()
    for member in model_and_optimizer.optimizer.members:
        for state in member.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
