"""Two steps of a plan's training code on fake tensors, and the live tensors at the peak of the second.

Each stage of a pipeline runs alone: forward of its micro-batches until as many are in flight as stages follow, then
backward and forward in turn (1F1B; Narayanan et al., arXiv:2104.04473). Tensors from the neighboring stages are new
tensors of the residual stream; sent ones are freed.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.data.loader import Batch
from bloomery.model.acting import acting_as
from bloomery.model.decoder import Backbone, Block, Decoder
from bloomery.parallel.apply import apply
from bloomery.parallel.mesh import ALONE, Mesh, shard
from bloomery.plan.estimate.mesh_memory import ONE_DEVICE, MeshSplit, kinds_of_stages, stage_config
from bloomery.plan.types import RunPlan
from bloomery.simulate.run import FLASH_LIKE
from bloomery.simulate.tensors import FakeResults, GpuFunctions, MemoryTracker, compile_blocks, flash
from bloomery.train.forward import forward
from bloomery.train.objectives.build import build_objective, meta_teacher, with_text_structure
from bloomery.train.optim.build import build_optimizer
from bloomery.train.state import empty_model
from bloomery.train.step import LossScale, ModelAndOptimizer, clip_factor, global_norm, scale_gradients, train_step

OnProgress = Callable[[str], None]


def simulated_step(
    plan: RunPlan, *, fused: bool, split: MeshSplit = ONE_DEVICE, on_progress: OnProgress = lambda _text: None
) -> dict[str, float]:
    """Bytes by part at the peak of the second step; `fused`: the plan's GPU has fused attention kernels.

    Two micro-batches stand for any number of them: from the second one on gradients are added to gradients. The first
    step makes the optimizer's states, for which one is enough.
    """
    mesh = _fake_mesh(split) if split.shard > 1 else None
    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, mesh=mesh, fused=fused)
        batches = [_batch(plan) for _ in range(min(2, plan.train.accumulation))]
        teacher = meta_teacher(plan) if plan.objective.spec.extra_forwards else None
        tracker.call("weights", [] if teacher is None else weights(teacher))
        tracker.call("inputs", [tensor for batch in batches for tensor in vars(batch).values() if tensor is not None])
        objective = build_objective(plan, lambda _: teacher or meta_teacher(plan))

        def step(count: int) -> None:
            train_step(model_and_optimizer, batches[:count], objective, plan=plan.train, lr_scale=1.0)

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

    def under_way(self, plan: RunPlan) -> int:
        """Micro-batches that the stage holds at most."""
        return min(self.ahead + 1, plan.train.accumulation)


def stage_positions(stages: int) -> list[StagePosition]:
    """One of each kind."""
    return [StagePosition(index, stages) for index in kinds_of_stages(stages)]


def simulated_stage(
    plan: RunPlan, place: StagePosition, *, fused: bool, on_progress: OnProgress = lambda _text: None
) -> dict[str, float]:
    """Bytes by part at the peak of the stage's second step; `fused` as in `simulated_step`.

    One micro-batch after the first backward stands for all that follow: from then on gradients are added to gradients.
    """
    config = stage_config(plan.model.config, place.stages)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"config": config})})
    last = place.ahead == 0

    def sent() -> Tensor:
        shape = plan.train.micro_batch_size, plan.data.sequence_length, config.hidden_size
        return torch.empty(shape, dtype=next(model_and_optimizer.model.parameters()).dtype)

    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(plan, tracker, place=place, fused=fused)
        if place.index:
            model_and_optimizer.model.model.embed = lambda *_: sent().requires_grad_()  # type: ignore[method-assign]
        objective, scale = build_objective(plan, meta_teacher), model_and_optimizer.scale
        factor = 1.0 if scale is None else scale.value

        def ahead() -> Tensor | GradientEdge:
            batch = _batch(plan)
            output = forward(model_and_optimizer.model, batch, objective.head(batch), precision=plan.train.precision)
            return objective.loss(output, batch).total * factor if last else get_gradient_edge(output)

        def step(count: int) -> None:
            under_way = deque[Tensor | GradientEdge]()
            for number in range(count + place.ahead):
                if number < count:
                    under_way.append(ahead())
                if number >= place.ahead and under_way:
                    torch.autograd.backward(under_way.popleft(), None if last else sent())
            gradients = list(tracker.gradients())
            norm = float(global_norm(gradients) / factor)
            scale_gradients(gradients, clip_factor(norm, plan.train.max_grad_norm) / factor)
            model_and_optimizer.optimizer.step(1.0)
            model_and_optimizer.optimizer.zero_grad()

        named = f"stage {place.index + 1} of {place.stages}, "
        return _peak(
            plan, model_and_optimizer, tracker, step, min(place.ahead + 2, plan.train.accumulation), on_progress, named
        )


@contextmanager
def _fake_tensors(plan: RunPlan) -> Iterator[MemoryTracker]:
    tracker, kind = MemoryTracker(), "cpu" if plan.train.device == "cpu" else "cuda"
    functions = nullcontext() if kind == "cpu" else GpuFunctions()
    with FakeTensorMode(allow_non_fake_inputs=True), functions, acting_as(kind, fuse=tracker.fuse):
        yield tracker


def _peak(
    plan: RunPlan,
    model_and_optimizer: ModelAndOptimizer,
    tracker: MemoryTracker,
    step: Callable[[int], None],
    most: int,
    on_progress: OnProgress,
    named: str = "",
) -> dict[str, float]:
    """Of a second step of so many micro-batches, after a first of one."""
    for number, count in (("first", 1), ("second", most)):
        on_progress(f"{named}the {number} of two steps")
        tracker.forget_peak()
        with tracker, FakeResults(tracker):
            step(count)
        tracker.call("optimizer", _states(model_and_optimizer))
    away = plan.train.device != "cpu" and plan.optimizer.offload  # in CPU memory
    return {kind: 0.0 if away and kind == "optimizer" else size for kind, size in tracker.peak.items()}


def _model_and_optimizer(
    plan: RunPlan,
    tracker: MemoryTracker,
    *,
    fused: bool,
    mesh: DeviceMesh | None = None,
    place: StagePosition | None = None,
) -> ModelAndOptimizer:
    """As `train.state.build_state`, with fake tensors; a compiled block is its graphs, run op by op."""
    model, train, attention = empty_model(plan), plan.train, plan.model.attention
    for module in model.modules():  # `to_empty` swaps tensors, which fake ones refuse
        for name, parameter in module.named_parameters(recurse=False):
            like = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(like, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    model.tie()
    if place is not None:
        _keep_stage(model, place)
    blocks = [block for block in model.model.layers if isinstance(block, Block)]
    for block in blocks if train.device != "cpu" else ():
        if attention in FLASH_LIKE and fused:
            block.self_attn.backend = flash
        elif attention in FLASH_LIKE | {"mask"}:
            block.self_attn.backend = "math"
        block.forward = GpuFunctions.around(block.forward)  # type: ignore[method-assign]
    if train.compile:
        compile_blocks(blocks, tracker)
    apply(model, train.model_copy(update={"compile": False, "offload_activations": False}))
    ranks = ALONE
    if mesh is not None:
        shard(model, train, mesh)
        ranks = Mesh(0, mesh.size() // mesh.size(mesh.ndim - 1), mesh.size(mesh.ndim - 1), "cpu", mesh)
    optimizer = build_optimizer(model, plan.optimizer, mesh=ranks)
    tracker.gradients = lambda: [p.grad for p in optimizer.parameters if p.grad is not None]
    tracker.call("weights", weights(model))
    return ModelAndOptimizer(model, optimizer, LossScale() if train.precision == "float16" else None)


def _keep_stage(model: Decoder, place: StagePosition) -> None:
    """In place: the first stage has the embeddings, the last one the head."""
    assert isinstance(model.model, Backbone), "the transformers implementation supports one device"
    if place.index:
        del model.model.embed_tokens
        if model.config.positions == "learned":
            del model.model.embed_positions
    if place.ahead:
        model.model.norm = nn.Identity()
        delattr(model, "score" if model.config.head == "values" else "lm_head")
        model.apply_head = lambda hidden_BTD, head: hidden_BTD  # type: ignore[method-assign]  # noqa: ARG005


def _fake_mesh(split: MeshSplit) -> DeviceMesh:
    """A fake process group, this process its first rank; created outside FakeTensorMode."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=split.replicate * split.shard)
    if split.replicate == 1:
        return init_device_mesh("cpu", (split.shard,))
    return init_device_mesh("cpu", (split.replicate, split.shard), mesh_dim_names=("replicate", "shard"))


def _batch(plan: RunPlan) -> Batch:
    """A micro-batch."""
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    numbers = [torch.empty(shape, dtype=torch.int64) for _ in range(4)]
    return with_text_structure(Batch(numbers[0], numbers[1], torch.empty(shape), numbers[2], numbers[3]), plan)


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Quantized weights are buffers, and so are the initial matrices of PiSSA."""
    yield from model.parameters()
    yield from model.buffers()


def _states(model_and_optimizer: ModelAndOptimizer) -> Iterator[Tensor]:
    """Everything that the optimizer keeps from step to step."""
    for member in model_and_optimizer.optimizer.members:
        for state in member.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))
