"""Two steps of a plan's real training code on fake tensors, and what was alive at the peak of the second."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh

from bloomery.data.loading.loader import Batch
from bloomery.model.decoder import Block, Decoder
from bloomery.parallel.apply import checkpoint_block
from bloomery.plan.types import Plan
from bloomery.simulate.answers import Answers
from bloomery.simulate.compiled import compile_blocks, fused_head
from bloomery.simulate.gpu_kernels import gpu_kernels
from bloomery.simulate.shards import ONE, Cut, fake_mesh, norms_over_shards, shard
from bloomery.simulate.tracker import Tracker
from bloomery.train.objectives.build import build_objective, completed, hollow_teacher
from bloomery.train.optim.build import build_optimizer
from bloomery.train.state import empty_model
from bloomery.train.step import LossScale, Trainee, train_step


def simulated_step(
    plan: Plan, *, fused: bool, cut: Cut = ONE, say: Callable[[str], None] = lambda _text: None
) -> dict[str, float]:
    """Bytes by part at the peak of the second step; `fused`: the plan's GPU has fused attention kernels.

    Two micro-batches stand for any number of them: from the second one on gradients are added to gradients. The first
    step makes the optimizer's states, for which one is enough.
    """
    gpu = plan.train.device != "cpu"
    mesh = fake_mesh(cut) if cut.shard > 1 else None
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu_kernels(fused=fused) if gpu else nullcontext(),
        fused_head() if plan.train.compile else nullcontext(),
        norms_over_shards() if cut.shard > 1 else nullcontext(),
    ):
        tracker = Tracker()
        trainee = prepared(decoder_of(plan), plan, tracker, mesh)
        tracker.ask(lambda: gradients(trainee))
        batches = [batch_of(plan) for _ in range(min(2, plan.train.accumulation))]
        teacher = hollow_teacher(plan) if plan.objective.spec.extra_forwards else None
        tracker.call("weights", (tensor for model in (trainee.model, teacher) if model for tensor in weights(model)))
        tracker.call("inputs", [tensor for batch in batches for tensor in vars(batch).values() if tensor is not None])
        objective = build_objective(plan, lambda _: teacher or hollow_teacher(plan))
        for number, some in (("first", batches[:1]), ("second", batches)):
            say(f"the {number} of two steps")
            tracker.forget_peak()
            with tracker, Answers(gpu=gpu):
                train_step(trainee, some, objective, plan=plan.train, share=1.0)
            tracker.call("optimizer", states(trainee))
    return on_device(tracker.peak, plan)


def on_device(peak: dict[str, float], plan: Plan) -> dict[str, float]:
    """Without the states that a GPU's optimizer keeps in the processor's memory."""
    away = plan.train.device != "cpu" and (plan.optimizer.paged or plan.optimizer.offload)
    return {kind: 0.0 if away and kind == "optimizer" else size for kind, size in peak.items()}


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Quantised ones are buffers, and so is what PiSSA began with."""
    yield from model.parameters()
    yield from model.buffers()


def gradients(trainee: Trainee) -> list[Tensor]:
    """Those that are there."""
    return [p.grad for p in trainee.optimizer.parameters if p.grad is not None]


def states(trainee: Trainee) -> Iterator[Tensor]:
    """Everything that the optimizer keeps from step to step."""
    for member in trainee.optimizer.members:
        for state in member.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def decoder_of(plan: Plan) -> Decoder:
    """The model that is trained, adapter and quantised weights included, on fake tensors."""
    model = empty_model(plan)
    for module in model.modules():  # `to_empty` swaps tensors, which fake ones refuse
        for name, parameter in module.named_parameters(recurse=False):
            like = torch.empty_like(parameter, device="cpu")
            setattr(module, name, nn.Parameter(like, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    model.tie()
    return model


def prepared(model: Decoder, plan: Plan, tracker: Tracker, mesh: DeviceMesh | None = None) -> Trainee:
    """What `train.state.build_state` builds, without numbers; a compiled block is its graphs, run op by op."""
    if plan.train.compile:
        compile_blocks((block for block in model.model.layers if isinstance(block, Block)), tracker.unseen)
    for index, block in enumerate(model.model.layers):
        checkpoint_block(block, plan.train.activation_checkpointing, index=index)
    if mesh is not None:
        shard(model, plan.train.precision, mesh)
    scale = LossScale() if plan.train.precision == "float16" else None
    return Trainee(model, build_optimizer(model, plan.optimizer), scale)


def batch_of(plan: Plan) -> Batch:
    """A micro-batch."""
    shape = plan.train.micro_batch, plan.data.sequence_length
    numbers = [torch.empty(shape, dtype=torch.int64) for _ in range(4)]
    return completed(Batch(numbers[0], numbers[1], torch.empty(shape), numbers[2], numbers[3]), plan)
