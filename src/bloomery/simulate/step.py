"""Two steps of a plan's training code on fake tensors, and the live tensors at the peak of the second.

Each stage of a pipeline runs alone, with a transport that neither sends nor receives: tensors from the neighboring
stages are new memory, sent ones are freed.

The tensors of a step say "cpu", whatever device it stands for. Where code or the size of its pieces depends on the
type of a device, the simulation hands in what that device has: operators of attention, norms and scores
(`simulate.kernels`), and the optimizer's `device_type`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from bloomery.data.batch import Batch
from bloomery.facts.attention import FLASH_LIKE
from bloomery.facts.config import Stage
from bloomery.infer.forward import matmul_dtype
from bloomery.model.configs import read_config
from bloomery.model.decoder import Block, Decoder
from bloomery.model.mixers.attention import Attention
from bloomery.model.mixers.delta_net import GatedDeltaNet
from bloomery.model.norms import RMSNorm, torch_rms_norm
from bloomery.parallel.apply import apply
from bloomery.parallel.context import HeadExchange
from bloomery.parallel.experts import EXPERT_AXIS, RowJourney, divide_experts
from bloomery.parallel.fsdp import apply_fsdp
from bloomery.parallel.mesh import SINGLE_RANK, Mesh, PipelineGroups
from bloomery.parallel.pipeline import PipelineLink, StageParameters
from bloomery.parallel.stage import keep_stage
from bloomery.plan.estimate.mesh import ONE_DEVICE, MeshSplit
from bloomery.plan.pipeline import even_groups, most_in_flight, stage_of
from bloomery.plan.types import RunPlan
from bloomery.simulate.graphs import compile_blocks
from bloomery.simulate.kernels import FakeResults, GpuFunctions, flash, score_operators
from bloomery.simulate.streamed import FakeStream
from bloomery.simulate.tracker import MemoryTracker
from bloomery.simulate.traffic import TrafficCounter
from bloomery.train.objectives.build import build_objective, with_text_structure
from bloomery.train.objectives.objective import TEACHER_HIDDEN
from bloomery.train.objectives.teacher import (
    TeacherPlan,
    loss_positions_of,
    meta_teacher,
)
from bloomery.train.optim.average import average_of
from bloomery.train.optim.build import build_optimizer
from bloomery.train.scorers.client import ScoredTeacher, TeacherOutput
from bloomery.train.state import empty_model
from bloomery.train.step import LossScale, ModelAndOptimizer, train_step

OnProgress = Callable[[str], None]


class SimulatedStep(NamedTuple):
    """Bytes of one device: those alive at the peak of the second step by what holds them, and those that it sends in a
    step of the plan by axis of the mesh, without the links of a pipeline.
    """

    parts: dict[str, float]
    sent: dict[str, float]


def simulated_step(
    plan: RunPlan,
    *,
    fused: bool,
    split: MeshSplit = ONE_DEVICE,
    on_progress: OnProgress = lambda _text: None,
) -> SimulatedStep:
    """Memory and traffic of a step; `fused`: the plan's GPU has fused attention kernels.

    Two micro-batches stand for any number of them, two of each load where several share it: from the second one on
    gradients are added to gradients. The first
    step makes the optimizer's states, for which one is enough.
    """
    mesh = _fake_mesh(split) if split.shard > 1 else None
    sharers = _fake_sharers(split) if split.context > 1 else SINGLE_RANK
    expert_mesh = _fake_expert_mesh(split) if split.expert > 1 else None
    device_type = plan.train.device
    with _fake_tensors(plan) as tracker:
        # All that is alive before the step has a kind of its own; what the step makes is told
        # apart by forward and backward.
        model_and_optimizer = _model_and_optimizer(
            plan, tracker, mesh=mesh, fused=fused, expert_mesh=expert_mesh
        )
        if sharers.context > 1:
            model_and_optimizer.model.share_sequences(HeadExchange(sharers))
        num_batches = min(2 * plan.train.stream_micro_batches, plan.train.accumulation)
        batches = [_batch(plan) for _ in range(num_batches)]
        tracker.call("inputs", [tensor for batch in batches for tensor in batch.tensors()])
        objective = build_objective(
            plan,
            partial(_load_teacher, tracker),
            mesh=sharers,
            operators=score_operators(tracker, device_type),
            value_head=model_and_optimizer.model.value_head,
            scored_teacher=_scored_teacher(plan, tracker),
        )

        def step(count: int) -> None:
            train_step(
                model_and_optimizer, batches[:count], objective, plan=plan.train, lr_scale=1.0
            )

        return _two_steps(
            plan, model_and_optimizer, tracker, step, len(batches), on_progress, mesh=mesh
        )


def simulated_micro_batches(split: MeshSplit, index: int, accumulation: int) -> int:
    """Micro-batches that stand for the `accumulation` of a step on one stage of a pipeline: the fewest that hold as
    much memory at once, and one round after the first backward. From then on gradients are added to gradients.
    """

    def in_flight(count: int) -> int:
        return most_in_flight(
            split.schedule,
            stages=split.pipeline,
            stage=index,
            micro_batches=count,
            chunks=split.chunks,
        )

    round_size = split.pipeline if split.chunks > 1 else 1
    most = in_flight(accumulation)
    fewest: int = next(
        count
        for count in (*range(round_size, accumulation, round_size), accumulation)
        if in_flight(count) == most
    )
    return min(fewest + round_size, accumulation)


def simulated_stage(
    plan: RunPlan,
    split: MeshSplit,
    index: int,
    *,
    fused: bool,
    on_progress: OnProgress = lambda _text: None,
) -> SimulatedStep:
    """Memory and traffic of one stage of a pipeline; `fused` as in `simulated_step`.

    `index` counts from 0.
    """
    layers = split.layers or even_groups(plan.model.config.num_layers, split.pipeline)
    train = plan.train.model_copy(
        update={
            "pipeline": split.pipeline,
            "pipeline_layers": layers,
            "pipeline_schedule": split.schedule,
        }
    )
    mesh = _fake_pipeline(split, index)
    with _fake_tensors(plan) as tracker:
        model_and_optimizer = _model_and_optimizer(
            plan,
            tracker,
            fused=fused,
            mesh=mesh.device_mesh,
            pipeline=mesh,
            stage=stage_of(plan.model.config, index, split.pipeline, layers),
        )
        objective = build_objective(
            plan,
            partial(_load_teacher, tracker),
            mesh=mesh,
            operators=score_operators(tracker, plan.train.device),
        )

        def step(count: int) -> None:
            batches = [_batch(plan) for _ in range(count)]
            train_step(model_and_optimizer, batches, objective, plan=train, lr_scale=1.0)

        return _two_steps(
            plan,
            model_and_optimizer,
            tracker,
            step,
            simulated_micro_batches(split, index, plan.train.accumulation),
            on_progress,
            mesh=mesh.device_mesh,
            prefix=f"stage {index + 1} of {split.pipeline}, ",
        )


@final
class FakeTransport:
    """Takes the place of a stage's neighbors: what they send is new memory, what they get is not held."""

    def send(self, tensor: Tensor, rank: int, edge: int, direction: int) -> None:
        """Nobody receives it."""

    def receive(self, empty: Tensor, rank: int, edge: int, direction: int) -> Tensor:  # noqa: ARG002
        return empty

    def settle(self) -> None:
        """Nothing is under way."""


def _fake_pipeline(split: MeshSplit, index: int) -> Mesh:
    """The first rank of a stage in a fake process group; created outside FakeTensorMode.

    Collectives of a fake group do nothing: one group stands for all. Copies of a stage are not simulated.
    """
    copies = split.replicate if split.shard > 1 else 1
    ranks = copies * split.shard
    group = _fake_group(split.pipeline * ranks, rank=index * ranks)
    device_mesh = None
    if split.shard > 1:
        sizes = {"pipeline": split.pipeline, "replicate": copies, "shard": split.shard}
        axes = {name: size for name, size in sizes.items() if size > 1}
        of_all_stages = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        device_mesh = of_all_stages[tuple(name for name in axes if name != "pipeline")]
    return Mesh(
        index * ranks,
        replicate=copies,
        shard=split.shard,
        stages=split.pipeline,
        device_mesh=device_mesh,
        groups=PipelineGroups(data=group, stages=group, ends=group),
    )


@contextmanager
def _fake_tensors(plan: RunPlan) -> Iterator[MemoryTracker]:
    functions = nullcontext() if plan.train.device == "cpu" else GpuFunctions()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), functions:
            yield MemoryTracker()
    finally:
        # Whoever saves a model next would take this process for one of several ranks.
        if dist.is_initialized():
            dist.destroy_process_group()


def _load_teacher(tracker: MemoryTracker, plan: TeacherPlan) -> Decoder:
    """In place of `train.objectives.teacher.load_teacher`: its weights, which are counted with those of the model."""
    teacher = meta_teacher(plan)
    if plan.stream == "layers":
        stream = FakeStream(teacher, tracker)
        teacher.weight_stream = stream
        tracker.call("weights", stream.tensors)
    tracker.call("weights", weights(teacher))
    _hand_in_norms(teacher, plan.device)
    return teacher


@final
@dataclass(frozen=True)
class FakeScorers:
    """Takes the place of scoring processes: the hidden states of a teacher so wide are made where they are read."""

    width: int
    dtype: torch.dtype

    def with_teacher(self, batches: Sequence[Batch], *, name: str) -> list[Batch]:
        return [self._completed(batch, name) for batch in batches]

    def _completed(self, batch: Batch, name: str) -> Batch:
        shape = batch.loss_mask.shape  # with a teacher of another tokenizer: a number per token
        if name == TEACHER_HIDDEN:
            shape = torch.Size([len(loss_positions_of(batch)), self.width])
        return batch.with_extras(**{name: torch.empty(shape, dtype=self.dtype)})


def _scored_teacher(plan: RunPlan, tracker: MemoryTracker) -> ScoredTeacher | None:
    """None where the teacher is on the device, or there is none."""
    if plan.train.scoring_devices == 0 or plan.objective.taught_by is None:
        return None
    teacher_plan = TeacherPlan.of(plan)

    def load_output() -> TeacherOutput:
        teacher = meta_teacher(teacher_plan)
        tracker.call("weights", [teacher.lm_head.weight])
        return TeacherOutput(teacher.lm_head, teacher.config.final_softcap)

    dtype = torch.float32 if plan.aligns_texts else matmul_dtype(plan.train.precision)
    return ScoredTeacher(
        FakeScorers(read_config(teacher_plan.folder).hidden_size, dtype), load_output
    )


def _hand_in_norms(model: Decoder, device_type: str) -> None:
    for module in model.modules() if device_type != "cpu" else ():
        if isinstance(module, RMSNorm):
            module.operator = torch_rms_norm


def _two_steps(
    plan: RunPlan,
    model_and_optimizer: ModelAndOptimizer,
    tracker: MemoryTracker,
    step: Callable[[int], None],
    num_micro_batches: int,
    on_progress: OnProgress,
    *,
    mesh: DeviceMesh | None,
    prefix: str = "",
) -> SimulatedStep:
    """The peak of a second step of so many micro-batches, after a first step of one; and what both send."""
    sent_by_step = list[dict[str, float]]()
    for number, count in (("first", 1), ("second", num_micro_batches)):
        on_progress(f"{prefix}the {number} of two steps")
        tracker.forget_peak()
        traffic = TrafficCounter(mesh)
        with traffic, tracker, FakeResults(tracker, plan.train.device):
            step(count)
        sent_by_step.append(traffic.bytes_by_axis)
        tracker.call("optimizer", _states(model_and_optimizer))

    # Each further micro-batch sends as much as those between the two steps: a step of the plan may have more of them.
    first, second = sent_by_step
    further = (plan.train.accumulation - 1) / max(1, num_micro_batches - 1)
    sent = {axis: first[axis] + further * (second[axis] - first[axis]) for axis in first}

    # Offloaded states are in the host's memory, which a simulation of a device does not count.
    stream = model_and_optimizer.model.weight_stream
    is_updated_on_host = isinstance(stream, FakeStream) and stream.updates_on_host
    is_offloaded = plan.train.device != "cpu" and plan.optimizer.offload
    offloaded = {"optimizer"} if is_offloaded or is_updated_on_host else set()
    parts = {kind: 0.0 if kind in offloaded else size for kind, size in tracker.peak.items()}
    return SimulatedStep(parts, sent)


def _model_and_optimizer(
    plan: RunPlan,
    tracker: MemoryTracker,
    *,
    fused: bool,
    mesh: DeviceMesh | None = None,
    pipeline: Mesh = SINGLE_RANK,
    stage: Stage | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> ModelAndOptimizer:
    """As `train.state.build_state`, with fake tensors; a compiled block is its graphs, run op by op."""
    model = empty_model(plan)
    stage_parameters = None
    if stage is not None:
        stage_parameters = StageParameters.of(model)
        stream_dtype = model.model.embed_tokens.weight.dtype
        keep_stage(model, stage)
        model.model.link = PipelineLink(
            pipeline,
            FakeTransport(),
            num_groups=len(stage.groups),
            width=plan.model.config.hidden_size,
            dtype=stream_dtype,
        )
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
    stream = FakeStream(model, tracker) if plan.train.stream == "layers" else None
    model.weight_stream = stream

    # Kernels of a GPU stand in for those of the CPU.
    _hand_in_norms(model, plan.train.device)
    blocks = [block for block in model.model.layers if isinstance(block, Block)]
    for block in blocks if train.device != "cpu" else ():
        if isinstance(block.mixer, Attention) and attention in FLASH_LIKE and fused:
            block.mixer.backend = flash
        elif isinstance(block.mixer, Attention) and attention in FLASH_LIKE | {"mask"}:
            block.mixer.backend = "math"
        if isinstance(block.mixer, GatedDeltaNet):
            block.mixer.device_type = train.device
        block.forward = GpuFunctions.around(block.forward)  # type: ignore[method-assign]  # a seam of nn.Module

    # Compilation is simulated by graphs, and offloaded activations are not: they would need copies.
    left: dict[str, object] = {"compile": False, "offload_activations": False, "stream": "off"}
    if train.compile:
        selective = train.activation_checkpointing == "selective"
        compile_blocks(blocks, tracker, selective=selective)
        left |= {"activation_checkpointing": "none"} if selective else {}
    apply(model, train.model_copy(update=left))
    if expert_mesh is not None:
        divide_experts(model, expert_mesh, EvenExchange.of(plan, expert_mesh))
    ranks = SINGLE_RANK
    if mesh is not None:
        apply_fsdp(model, train, mesh)
        num_shards = mesh.size(mesh.ndim - 1)
        ranks = Mesh(replicate=mesh.size() // num_shards, shard=num_shards, device_mesh=mesh)
    optimizer = build_optimizer(model, plan.optimizer, mesh=ranks, device_type=plan.train.device)
    tracker.gradients = lambda: [p.grad for p in optimizer.parameters if p.grad is not None]
    tracker.call("weights", weights(model))
    if stream is not None:
        tracker.call("weights", stream.tensors)
    scale = LossScale() if train.precision == "float16" else None
    return ModelAndOptimizer(
        model,
        optimizer,
        scale,
        average=average_of(model, train.ema_decay),
        mesh=pipeline,
        stage_parameters=stage_parameters,
    )


def _fake_mesh(split: MeshSplit) -> DeviceMesh:
    """A fake process group, this process its first rank; created outside FakeTensorMode."""
    _fake_group(split.replicate * split.shard)
    if split.replicate == 1:
        return init_device_mesh("cpu", (split.shard,))
    return init_device_mesh(
        "cpu", (split.replicate, split.shard), mesh_dim_names=("replicate", "shard")
    )


def _fake_expert_mesh(split: MeshSplit) -> DeviceMesh:
    """The first ranks, which divide the experts; created outside FakeTensorMode."""
    if split.shard == 1 and split.context == 1:
        _fake_group(split.replicate)
    group = dist.new_group(range(split.expert))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(EXPERT_AXIS,))


@final
class EvenExchange:
    """An `ExpertExchange` with ranks that are not there. As many rows arrive as leave, from and for each: real tokens
    would decide it.
    """

    def __init__(self, size: int, rows: int, name: str) -> None:
        self.size = size
        self._rows = rows
        self._name = name

    @classmethod
    def of(cls, plan: RunPlan, expert_mesh: DeviceMesh) -> "EvenExchange":
        experts = plan.model.config.experts
        assert experts is not None, "the experts are divided"
        tokens = plan.train.micro_batch_size * plan.data.sequence_length // plan.train.context
        name = expert_mesh.get_group().group_name
        return cls(expert_mesh.size(), tokens * experts.per_token, name)

    def begin(self, ends_E: Tensor) -> RowJourney:
        by_rank = [self._rows // self.size] * (self.size - 1)
        by_rank.append(self._rows - sum(by_rank))
        experts_R = ends_E.new_zeros(self._rows, dtype=torch.int64)
        return RowJourney(self._name, experts_R, by_rank, by_rank)


def _fake_sharers(split: MeshSplit) -> Mesh:
    """The first rank of those that share its sequences; created outside FakeTensorMode."""
    if split.shard == 1:
        _fake_group(split.replicate)
    return Mesh(
        replicate=split.replicate,
        shard=split.shard,
        context=split.context,
        shared_sequences=dist.new_group(range(split.context)),
    )


def _fake_group(world_size: int, *, rank: int = 0) -> dist.ProcessGroup:
    """The group of all ranks, none of which exists: its collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    return group


def _batch(plan: RunPlan) -> Batch:
    """A micro-batch."""
    shape = plan.train.micro_batch_size, plan.data.sequence_length
    numbers = [torch.empty(shape, dtype=torch.int64) for _ in range(4)]
    whole = Batch(numbers[0], numbers[1], torch.empty(shape), numbers[2], numbers[3])
    return with_text_structure(whole, plan).part(
        0, plan.train.context, keeps_whole=plan.objective.spec.samples
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
