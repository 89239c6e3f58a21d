"""The stages of a pipeline, each alone on fake tensors: its layers, and what 1F1B has under way on it.

A stage runs its part of the step's micro-batches forward until as many are under way as stages follow, and from then on
backward and forward in turn (Narayanan et al., arXiv:2104.04473). What a neighbour sends is a tensor of the residual
stream; what was sent is let go of.
"""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge, get_gradient_edge

from bloomery.data.loading.loader import Batch
from bloomery.model.attention.attend import layout_of
from bloomery.model.decoder import Backbone, Decoder
from bloomery.plan.estimate.mesh_memory import kinds_of_stages, stage_config
from bloomery.plan.types import Plan
from bloomery.simulate.answers import Answers
from bloomery.simulate.compiled import fused_head
from bloomery.simulate.gpu_kernels import gpu_kernels
from bloomery.simulate.step import batch_of, decoder_of, gradients, on_device, prepared, states, weights
from bloomery.simulate.tracker import Tracker
from bloomery.train.forward import precision_context
from bloomery.train.objectives.build import build_objective, hollow_teacher
from bloomery.train.step import Trainee, clip_factor, global_norm, scale_gradients

Edge = Tensor | GradientEdge  # where backward begins


@dataclass(frozen=True)
class Place:
    """Which of so many stages."""

    index: int
    stages: int

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def ahead(self) -> int:
        """Micro-batches that wait for their backward while one more goes forward."""
        return self.stages - self.index - 1

    def under_way(self, plan: Plan) -> int:
        """Micro-batches that the stage holds at most."""
        return min(self.ahead + 1, plan.train.accumulation)


def places(stages: int) -> list[Place]:
    """One of each kind."""
    return [Place(index, stages) for index in kinds_of_stages(stages)]


def simulated_stages(
    plan: Plan, stages: int, *, fused: bool, say: Callable[[str], None]
) -> list[tuple[int, int, dict[str, float]]]:
    """Of one stage of each kind its number, how many micro-batches it holds at most, and its bytes by part."""
    return [
        (place.index + 1, place.under_way(plan), simulated_stage(plan, place, fused=fused, say=say))
        for place in places(stages)
    ]


def simulated_stage(
    plan: Plan, place: Place, *, fused: bool, say: Callable[[str], None] = lambda _text: None
) -> dict[str, float]:
    """Bytes by part at the peak of the stage's second step; `fused` as in `simulated_step`.

    One micro-batch after the first backward stands for all that follow: from then on gradients are added to gradients.
    """
    config = stage_config(plan.model.config, place.stages)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"config": config})})
    gpu = plan.train.device != "cpu"
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu_kernels(fused=fused) if gpu else nullcontext(),
        fused_head() if plan.train.compile else nullcontext(),
    ):
        tracker = Tracker()
        trainee = prepared(_cut(decoder_of(plan), place), plan, tracker)
        tracker.ask(lambda: gradients(trainee))
        tracker.call("weights", weights(trainee.model))
        stage = _Stage(trainee, plan, place)
        for number, count in (("first", 1), ("second", min(place.ahead + 2, plan.train.accumulation))):
            say(f"stage {place.index + 1} of {place.stages}, the {number} of two steps")
            tracker.forget_peak()
            with tracker, Answers(gpu=gpu):
                stage.step(count)
            tracker.call("optimizer", states(trainee))
    return on_device(tracker.peak, plan)


def _cut(model: Decoder, place: Place) -> Decoder:
    """In place: the first stage alone embeds, the last alone scores."""
    if not place.first:
        del model.model.embed_tokens
        if model.config.positions == "learned":
            del model.model.embed_positions
    if not place.last:
        del model.model.norm
        delattr(model, "score" if model.config.head == "values" else "lm_head")
    return model


@dataclass
class _Stage:
    trainee: Trainee
    plan: Plan
    place: Place

    def __post_init__(self) -> None:
        self.objective = build_objective(self.plan, hollow_teacher)

    def step(self, count: int) -> None:
        """So many micro-batches as 1F1B orders them, and the update."""
        under_way: deque[Edge] = deque()
        for _ in range(count):
            with precision_context(self.plan.train.precision, "cpu"):
                under_way.append(self._forward(batch_of(self.plan)))
            if len(under_way) > self.place.ahead:
                self._backward(under_way.popleft())
        while under_way:
            self._backward(under_way.popleft())
        self._update()

    def _forward(self, batch: Batch) -> Edge:
        backbone = self.trainee.model.model
        assert isinstance(backbone, Backbone), "transformers' layers are planned on one device"
        positions = backbone.positions(batch.tokens, batch.positions, None)
        x_BTD = backbone.embed(batch.tokens, positions) if self.place.first else self._stream().requires_grad_()
        layout = layout_of(batch.documents if backbone.backend != "sdpa" else None, backend=backbone.backend)
        for block, rotary in zip(backbone.layers, backbone.rotary(positions), strict=True):
            x_BTD = block(x_BTD, rotary, layout)
        if not self.place.last:
            return get_gradient_edge(x_BTD)
        output = self.trainee.model.judged(backbone.norm(x_BTD), self.objective.head(batch))
        return self.objective.loss(output, batch).total * self._factor()

    def _backward(self, edge: Edge) -> None:
        torch.autograd.backward(edge, None if self.place.last else self._stream())

    def _stream(self) -> Tensor:
        """What a neighbour sends."""
        shape = self.plan.train.micro_batch, self.plan.data.sequence_length, self.plan.model.config.hidden_size
        return torch.empty(shape, dtype=next(self.trainee.model.parameters()).dtype)

    def _factor(self) -> float:
        scale = self.trainee.scale
        return 1.0 if scale is None else scale.value

    def _update(self) -> None:
        """The end of `train_step`."""
        found = gradients(self.trainee)
        norm = float(global_norm(found) / self._factor())
        scale_gradients(found, clip_factor(norm, self.plan.train.clip) / self._factor())
        self.trainee.optimizer.step(1.0)
        self.trainee.optimizer.zero_grad()
