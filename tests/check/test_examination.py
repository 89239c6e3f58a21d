"""The check of one step: another implementation on the CPU stands for the GPU, with and without faults."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from faulty_devices import (
    DEVICE_NAME,
    FAULTS,
    HYBRID,
    crash,
    other_bits,
    plan_of,
    transposed_gradient,
)
from healthy_devices import healthy_plans
from plans_for_tests import tiny_plan

from bloomery.check.examination import examine
from bloomery.check.known_devices import FILE, identity_of, key_of
from bloomery.check.run_start import check_step_of_ranks
from bloomery.check.updates import exact_optimizer
from bloomery.check.verdict import judge
from bloomery.core.files import cache_folder
from bloomery.facts.config import DeltaNet
from bloomery.facts.optimizers import OPTIMIZERS, OptimizerSpec
from bloomery.monitor.events import StepChecked
from bloomery.monitor.words import checked_text
from bloomery.recipe.schema import Lora, Peft, Quantize
from bloomery.train.optim.muon import iteration_dtype

pytestmark = pytest.mark.usefixtures("own_cache")

# Which of the faults every test run injects; the others cost as much time again.
QUICK = (
    "leaking delta net",
    "wrong tile in attention",
    "stale memory",
    "shifted scale of a block",
    "dropped weight decay",
)
soak = pytest.mark.soak
MACHINES = Path(__file__).parents[1] / "machines"


# Faults are found and named


@pytest.mark.parametrize(
    "fault", [name if name in QUICK else pytest.param(name, marks=soak) for name in FAULTS]
)
def test_a_fault_is_named(fault, sides):
    inject, sections, part, quantity = FAULTS[fault]
    inject(sides)
    examination = examine(plan_of(**sections))
    assert examination.faults[0].part == part
    assert f"computes wrong {quantity} in {part}" == examination.faults[0].text
    # Where the CPU has instructions for it, Muon iterates in bfloat16 in a float32 run, too: its rounding hides more.
    in_half = "Muon" in fault and iteration_dtype(torch.device("cpu")) == torch.bfloat16
    margin = 1 if in_half else 100
    assert examination.faults[0].error > margin * examination.faults[0].bound


@soak
@pytest.mark.parametrize("fault", [name for name in FAULTS if name != "wrong compiled layer"])
def test_a_fault_is_named_in_half_precision(fault, sides):
    inject, sections, part, quantity = FAULTS[fault]
    inject(sides)
    examination = examine(plan_of(train={"precision": "bfloat16"}, **sections))
    assert examination.faults[0].text == f"computes wrong {quantity} in {part}"


def test_the_precision_that_is_right_is_the_way_out(sides):
    """The sentence of the specification: wrong gradients in one matrix, in bfloat16 alone."""
    transposed_gradient(sides, dtypes=(torch.bfloat16,))
    verdict = judge(plan_of(train={"precision": "bfloat16"}), None)
    assert verdict.problem == f"this {DEVICE_NAME} computes wrong gradients in q_proj with bfloat16"
    assert verdict.fix.startswith("set train.precision=float16,")
    assert not verdict.in_attention
    # What failed is kept to be read, and never believed.
    (entry,) = json.loads((cache_folder() / FILE).read_text()).values()
    assert "wrong gradients in q_proj" in entry["findings"][0]
    assert entry["torch"] == torch.__version__
    again = judge(plan_of(train={"precision": "bfloat16"}), None)
    assert again.problem and not again.from_cache


def test_wrong_attention_names_the_backend_that_is_right(sides):
    FAULTS["swapped heads"][0](sides)
    verdict = judge(plan_of(), None)
    assert verdict.problem == f"this {DEVICE_NAME} computes wrong results in attention with float32"
    assert verdict.fix.startswith("set train.attention=blockwise,")
    assert verdict.in_attention


def test_where_nothing_helps_no_setting_is_named(sides):
    FAULTS["wrong rotation"][0](sides)
    verdict = judge(plan_of(), None)
    assert "rotary positions" in verdict.problem
    assert "no setting that was tried" in verdict.fix


def test_an_error_of_the_device_names_the_part(sides):
    crash(sides)
    examination = examine(plan_of())
    assert [fault.part for fault in examination.faults] == ["attention"]
    assert examination.faults[0].text == "fails in attention"
    assert "HIP error" in examination.faults[0].detail


def test_after_an_error_of_the_device_nothing_else_is_tried(sides):
    """A GPU answers every later call in the process with the same error, also the one that restores a generator."""
    tried = []

    def faulty(_right, *_inputs):
        tried.append(1)
        raise torch.AcceleratorError("HIP error: an illegal memory access was encountered")

    sides.attention(faulty)
    verdict = judge(plan_of(), None)
    assert verdict.problem == f"this {DEVICE_NAME} fails in attention with float32"
    assert "doctor --probe" in verdict.fix and "set train" not in verdict.fix


def test_other_bits_at_the_second_time_are_named_and_not_wrong(sides):
    other_bits(sides)
    examination = examine(plan_of(train={"precision": "bfloat16"}))
    assert examination.faults == ()
    assert "attention" in examination.unrepeatable


# A healthy device is not blamed

HEALTHY = healthy_plans()
QUICK_HEALTHY = 23  # GPT-2 with LoRA in float32: its small gradients were blamed once


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if index == QUICK_HEALTHY else soak)
        for index, name in enumerate(HEALTHY)
    ],
)
def test_a_healthy_device_is_not_blamed(name):
    examination = examine(HEALTHY[name])
    assert examination.faults == ()
    assert examination.unrepeatable == ()


SWITCHED = {
    "cohere": {
        "qk_norm": "none",
        "norm": "layer",
        "norm_bias": False,
        "norm_placement": "shared",
        "rope_interleave": True,
        "logit_scale": 0.3,
        "tie_embeddings": True,
    },
    "hunyuan_v1_dense": {"qk_norm": "rotated_head"},
    "nemotron": {
        "qk_norm": "none",
        "norm": "layer_unit_offset",
        "activation": "relu2",
        "gated_mlp": False,
        "rotary_share": 0.5,
    },
    "llama": {"qk_norm": "none", "attention_sinks": True},
    "apertus": {"activation": "xielu", "gated_mlp": False, "tie_embeddings": False},
    "olmo_hybrid": {
        "qk_norm": "full",
        "norm_placement": "by_mixer",
        "tie_embeddings": False,
        "num_layers": 2,
        "mixers": ("delta_net", "attention"),
        "delta_net": DeltaNet(
            num_key_heads=2,
            num_value_heads=4,
            key_head_dim=16,
            value_head_dim=32,
            projections="separate",
            negative_eigenvalues=True,
            norm_eps=1e-5,
        ),
    },
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SWITCHED)
@soak
def test_switches_of_layers_are_not_blamed(family, precision):
    plan = plan_of(
        config={"family": family, **SWITCHED[family]},
        model={"attention": "blockwise"},
        train={"precision": precision},
    )
    examination = examine(plan)
    assert examination.faults == ()
    assert examination.unrepeatable == ()


@pytest.mark.parametrize(
    "precision",
    [pytest.param("float32", marks=soak), "bfloat16", pytest.param("float16", marks=soak)],
)
def test_layers_with_another_mixer_are_not_blamed(precision):
    plan = plan_of(
        config=HYBRID,
        train={"precision": precision},
        adapter=Lora(kind="lora", rank=4, target_modules=["all-linear"]),
        quantize=Quantize(kind="nf4"),
    )
    examination = examine(plan)
    assert examination.faults == ()
    assert examination.unrepeatable == ()


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (
            "vera",
            {"r": 4},
        ),  # whose second vector is 0 at first, and with it the gradient of the first
        pytest.param("adalora", {"init_r": 6, "target_r": 4}, marks=soak),
        pytest.param("oft", {}, marks=soak),
    ],
)
def test_methods_of_peft_are_not_blamed(method, fields):
    adapter = Peft(kind="peft", method=method, target_modules=["q_proj", "v_proj"], **fields)
    examination = examine(plan_of(adapter=adapter))
    assert examination.faults == ()
    assert examination.unrepeatable == ()


class Lion(torch.optim.Optimizer):
    """arXiv:2302.06675: an update of the size of the learning rate, from the sign of a momentum."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        del closure
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(group["lr"] * (0.9 * momentum + 0.1 * p.grad).sign())
                momentum.lerp_(p.grad, 0.01)


@pytest.fixture
def plan_of_lion(monkeypatch):
    """A plan with an optimizer that was added as docs/contributing/growing-it.md says: a spec and a builder."""

    def build_lion(named_parameters, *, plan, **_settings):
        return [Lion(list(named_parameters.values()), plan.learning_rate)]

    spec = OptimizerSpec(
        name="Lion",
        state_values=lambda _, shape: math.prod(shape),
        update_bytes=lambda _update: 0.0,
        module="lion_for_tests",
    )
    code = ModuleType("lion_for_tests")
    code.build = build_lion
    monkeypatch.setitem(sys.modules, code.__name__, code)
    monkeypatch.setitem(OPTIMIZERS, "lion", spec)

    def plan_with(**sections):
        plan = plan_of(**sections)
        return plan.model_copy(
            update={"optimizer": plan.optimizer.model_copy(update={"kind": "lion"})}
        )

    return plan_with


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # the name is not in the schema
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-pure"])
def test_an_optimizer_without_a_formula_is_not_compared(plan_of_lion, precision):
    examination = examine(plan_of_lion(train={"precision": precision}))
    assert examination.faults == ()
    assert examination.unrepeatable == ()


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.usefixtures("checks_the_cpu")
def test_what_is_not_compared_is_said(plan_of_lion, tmp_path):
    events = []
    check_step_of_ranks(plan_of_lion(), tmp_path, events.append)
    (checked,) = [event for event in events if isinstance(event, StepChecked)]
    assert checked.problem == "" and checked.not_compared == "the updates of optimizer.kind=lion"
    assert checked_text(checked).endswith("; not compared: the updates of optimizer.kind=lion")

    # Everything else is compared: the gradients, and the parts of the model.
    events.clear()
    check_step_of_ranks(plan_of(), tmp_path, events.append)
    (checked,) = [event for event in events if isinstance(event, StepChecked)]
    assert checked.not_compared == ""


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_wrong_gradients_are_found_with_any_optimizer(plan_of_lion, sides):
    FAULTS["swapped heads"][0](sides)
    assert examine(plan_of_lion()).faults[0].part == "attention"


@soak  # compiles for a minute or more
def test_compiled_layers_are_not_blamed():
    assert examine(plan_of(train={"compile": True, "precision": "bfloat16"})).faults == ()


def test_fifty_configurations_differ():
    assert len(HEALTHY) == 50
    keys = {key_of(plan, identity_of(plan.train.device, None)) for plan in HEALTHY.values()}
    assert len(keys) == 50


@pytest.mark.parametrize("kind", ["adamw", "adafactor", "muon"])
def test_the_exact_optimizers_are_torchs(kind):
    """Three updates of a matrix in float64, next to PyTorch's own optimizer."""
    plan = tiny_plan(optimizer={"kind": kind, "learning_rate": 0.03}).optimizer
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight.clone())
    exact = exact_optimizer(plan, "model.layers.0.mlp.up_proj.weight", (6, 9))
    theirs = {
        "adamw": lambda: torch.optim.AdamW(
            [parameter], lr=0.03, betas=plan.betas, eps=plan.eps, weight_decay=plan.weight_decay
        ),
        "adafactor": lambda: torch.optim.Adafactor(
            [parameter], lr=0.03, eps=(1e-30, 1e-3), weight_decay=plan.weight_decay
        ),
        "muon": lambda: torch.optim.Muon(
            [parameter],
            lr=plan.muon_learning_rate,
            momentum=plan.momentum,
            weight_decay=plan.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
    }[kind]()
    for _ in range(3):
        gradient = torch.randn(6, 9, generator=generator, dtype=torch.float64)
        parameter.grad = gradient.clone()
        theirs.step()
        weight = exact.step(weight, gradient)
    # torch's Muon iterates in bfloat16, whose last bits differ from ours.
    torch.testing.assert_close(
        parameter.detach(), weight, rtol=0, atol=0.02 if kind == "muon" else 1e-12
    )
