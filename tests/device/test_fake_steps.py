"""The production step of every recipe on tensors that have a device but no memory: FakeTensor refuses to mix devices.

Kernels that no CPU has, such as varlen's and FlexAttention's, are asked for the shapes that they give.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bloomery.core.errors import UserError
from bloomery.data.batch import Batch
from bloomery.facts.counting import layers
from bloomery.model.decoder import Decoder
from bloomery.parallel.apply import apply
from bloomery.plan.choices import reference_of
from bloomery.plan.types import RunPlan
from bloomery.recipe.load import load_recipe
from bloomery.simulate.kernels import FakeResults
from bloomery.simulate.step import _batch
from bloomery.train.objectives.build import build_objective
from bloomery.train.objectives.teacher import meta_teacher
from bloomery.train.optim.average import average_of
from bloomery.train.optim.build import build_optimizer
from bloomery.train.rl.rollout import RolloutSample, TokenTargets, pack
from bloomery.train.state import empty_model
from bloomery.train.step import LossScale, ModelAndOptimizer, train_step

sys.path.append(str(Path(__file__).parents[1] / "plan"))
from plan_help import gpu_machine, planned

RECIPES = sorted(
    path.stem for path in Path(load_recipe.__code__.co_filename).parents[1].glob("recipes/*.yaml")
)
TINY = [name for name in RECIPES if name.endswith("-tiny") and "pipeline" not in name]
FULL_SIZE = [name for name in RECIPES if not name.endswith("-tiny") and "pipeline" not in name]
OPTIONS = [
    "optimizer.kind=adafactor",
    "optimizer.kind=muon",
    "optimizer.state_dtype=int8",
    "optimizer.state_dtype=bfloat16 optimizer.stochastic_rounding=true",
    "optimizer.offload=true",
    "optimizer.fused_backward=true optimizer.kind=adafactor",
    "train.activation_checkpointing=full train.offload_activations=true",
    "train.activation_checkpointing=none train.offload_activations=true",
    "train.activation_checkpointing=selective",
    "train.attention=varlen",
    "train.attention=blockwise",
    "train.attention=triton",
    "train.attention=math",
    "train.attention=mask",
    "train.precision=float16",
    "train.precision=bfloat16-pure",
    "train.precision=float32",
    "train.ema_decay=0.99",
    "train.neftune_alpha=5",
]


def plan_of(recipe: str, *changes: str) -> RunPlan:
    """For one MI300X. Of a large model two layers, or six where kinds of layers take turns."""
    settings = ["train.compile=false", *changes]
    plan = planned(load_recipe(recipe, settings), gpu_machine("MI300X"))
    if plan.model.attention == "flex":  # PyTorch has no step of it on fake tensors
        settings.append("train.attention=blockwise")
        plan = planned(load_recipe(recipe, settings), gpu_machine("MI300X"))
    config = plan.model.config
    has_kinds = len({layer.kind for layer in layers(config)}) > 1
    count = min(config.num_layers, 6 if has_kinds else 2)
    per_layer = ("sliding_window", "rotary_layers", "layer_sizes", "mixers")
    config = replace(
        config,
        num_layers=count,
        # The layers that share keys are the last ones, which a shorter model lacks.
        num_kv_shared_layers=config.num_kv_shared_layers if count == config.num_layers else 0,
        **{name: getattr(config, name)[:count] for name in per_layer},
    )
    model = plan.model.model_copy(update={"source": None, "config": config})
    # Weights that stream are bytes of the host's memory, which fake tensors lack: test_streamed_*.py takes those steps.
    train = plan.train.model_copy(update={"stream": "off", "stream_micro_batches": 1})
    return plan.model_copy(update={"model": model, "train": train})


def on_gpu(model: Decoder) -> Decoder:
    """In place: what `to_empty` does, which would swap tensors, and fake ones refuse that."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            like = torch.empty_like(parameter, device="cuda")
            setattr(module, name, nn.Parameter(like, requires_grad=parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.empty_like(buffer, device="cuda"), persistent=False)
    model.tie()
    return model


def micro_batch(plan: RunPlan) -> Batch:
    """On the host, where the loader makes it."""
    if plan.objective.spec.source != "rollouts":
        return _batch(plan)
    size = 4
    numbers = (0.5,) * size
    targets = TokenTargets(numbers, numbers, numbers) if plan.objective.spec.value_head else None
    sample = RolloutSample((1, 2, 3), (4, 5, 6, 7), numbers, 1.0, numbers, targets=targets)
    rows = plan.train.micro_batch_size
    (batch,), _ = pack([sample] * rows, length=size + 3, rows=rows)
    return batch


def take_fake_steps(plan: RunPlan, *, steps: int = 1) -> None:
    """Two micro-batches each, and the states of the optimizer read back as from a checkpoint."""
    quiet = SimpleNamespace(hidden=False, fuse=lambda function: function)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = on_gpu(empty_model(plan))
        apply(model, plan.train)
        optimizer = build_optimizer(model, plan.optimizer)
        both = ModelAndOptimizer(
            model,
            optimizer,
            LossScale() if plan.train.precision == "float16" else None,
            average=average_of(model, plan.train.ema_decay),
        )
        reference = None
        if reference_of(plan.objective, plan.adapter, plan.vision.train).value == "copy":
            reference = on_gpu(empty_model(plan)).requires_grad_(False)
        objective = build_objective(
            plan,
            lambda teacher: on_gpu(meta_teacher(teacher)),
            value_head=model.value_head,
            reference=reference,
        )
        batches = [micro_batch(plan) for _ in range(min(2, plan.train.accumulation))]
        with FakeResults(quiet, "cuda"):
            for _ in range(steps):
                train_step(both, batches, objective, plan=plan.train, lr_scale=1.0)
            scalars = dict.fromkeys(optimizer.scalars(), 1.0)
            optimizer.load(dict(optimizer.named_tensors()), scalars)
            for parameter in optimizer.parameters:
                assert parameter.device == torch.device("cuda:0")


@pytest.mark.sampled(8)
@pytest.mark.parametrize("recipe", TINY)
def test_the_step_of_a_tiny_recipe(recipe: str) -> None:
    take_fake_steps(plan_of(recipe))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("changes", OPTIONS)
def test_the_step_with_each_option(changes: str) -> None:
    take_fake_steps(plan_of("llama3.1-8b-lora-tiny", *changes.split()), steps=2)


@pytest.mark.soak
@pytest.mark.parametrize("recipe", FULL_SIZE)
def test_the_step_of_a_recipe_in_full_size(recipe: str) -> None:
    try:
        plan = plan_of(recipe)
    except UserError as error:  # data or a model that is not here, or more than one GPU holds
        pytest.skip(str(error))
    take_fake_steps(plan)


def test_a_step_that_mixes_devices_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: positions that stayed on the host."""
    whole = Batch.map_tensors

    def without_positions(batch: Batch, change: object) -> Batch:
        return replace(whole(batch, change), positions=batch.positions)

    monkeypatch.setattr(Batch, "map_tensors", without_positions)
    with pytest.raises(Exception, match="cpu"):
        take_fake_steps(plan_of("llama3.1-8b-lora-tiny"))
