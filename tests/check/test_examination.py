"""The check of one step before a run: another implementation on the CPU stands for the GPU, with and without faults."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from faulty_devices import (
    ALL_LINEAR,
    CONFIG,
    FAULTS,
    Sides,
    crash,
    other_bits,
    plan_of,
    transposed_gradient,
)
from healthy_devices import healthy_plans
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import RECIPE, Run

from bloomery.check import run_start, step_probes
from bloomery.check import verdict as verdicts
from bloomery.check.examination import examine
from bloomery.check.known_devices import FILE, identity_of, keep_answer, key_of, known_answer
from bloomery.check.rounding import UNIT_ROUNDOFF, bound_of, device_roundoff, tile_error
from bloomery.check.run_start import WrongNumbers, check_step_of_ranks
from bloomery.check.small_model import small_plan
from bloomery.check.updates import exact_optimizer
from bloomery.check.verdict import judge
from bloomery.cli import train as train_command
from bloomery.core.files import cache_folder
from bloomery.facts.optimizers import OPTIMIZERS, OptimizerSpec
from bloomery.hardware.machine import Probe, read_machine
from bloomery.hardware.probes import ProbeSpec, probe
from bloomery.monitor.events import Phase, StepChecked, Warned
from bloomery.monitor.words import checked_text
from bloomery.parallel.process_group import join
from bloomery.plan.types import RunPlan
from bloomery.recipe.schema import Peft, Quantize
from bloomery.runs import flow, lifecycle
from bloomery.train.failures import Unsound
from bloomery.train.optim.muon import iteration_dtype
from ranks import on_ranks, ranks

# Which of the faults every test run injects; the others cost as much time again.
QUICK = (
    "wrong tile in attention",
    "stale memory",
    "shifted scale of a block",
    "dropped weight decay",
)
soak = pytest.mark.soak
MACHINES = Path(__file__).parents[1] / "machines"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def sides(monkeypatch) -> Sides:
    return Sides(monkeypatch)


@pytest.fixture
def checks_the_cpu(monkeypatch):
    """As if the CPU of the plan was a GPU."""
    monkeypatch.setattr(run_start, "is_checked", lambda *_: True)


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
    assert verdict.problem == "this CPU computes wrong gradients in q_proj with bfloat16"
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
    assert verdict.problem == "this CPU computes wrong results in attention with float32"
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
    assert verdict.problem == "this CPU fails in attention with float32"
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


# The probes of the doctor and of scripts/gpu_check.sh


def test_a_probe_names_the_part_and_the_way_out(sides):
    FAULTS["swapped heads"][0](sides)
    result = step_probes.examined(plan_of())
    assert result["outcome"] == "wrong"
    assert result["message"] == (
        "this CPU computes wrong results in attention with float32: use blockwise attention"
    )
    assert result["facts"]["fix"] == "train.attention=blockwise"
    assert Probe.model_validate(result | {"name": "step-float32"}).outcome == "wrong"


@pytest.mark.soak
def test_probes_in_their_child_process():
    """The child of a doctor on a GPU, here with the CPU in its place."""
    kinds = ("float32", "bfloat16", "compiled")
    specs = [
        ProbeSpec(name=f"step-{kind}", module=step_probes.__name__, seconds=200) for kind in kinds
    ]
    job = {"device": "cpu", "dtype": "float32", "arch": "", "recipe": "go-coder-tiny"}
    results = probe(specs, job, environment=dict(os.environ))
    assert [result.outcome for result in results] == ["ok", "ok", "ok"], results
    assert [result.facts["precision"] for result in results] == ["float32", "bfloat16", "float32"]


def test_a_gpu_is_probed_in_each_precision_and_a_cpu_not_at_all():
    gpu = read_machine(MACHINES / "mi300x-node.json")
    assert [spec.name for spec in step_probes.step_probe_specs(gpu)] == [
        "step-float32",
        "step-float16",
        "step-bfloat16",
        "step-compiled",
    ]
    cpu = read_machine(MACHINES / "laptop-without-a-gpu.json")
    assert step_probes.step_probe_specs(cpu) == ()


# Bounds


def test_bounds_follow_from_the_precision():
    assert bound_of(2.0**-8, roundings=4) == pytest.approx(4 * (2 * 2.0**-8 + 2.0**-24))
    numbers = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    for dtype, roundoff in UNIT_ROUNDOFF.items():
        rounded = numbers.double().to(dtype) if dtype != torch.float32 else numbers.double().float()
        error = tile_error(rounded, numbers.double())
        assert error <= roundoff  # one rounding, and its mean square is a third
        assert dtype == torch.float32 or error > roundoff / 4


def test_a_gpu_rounds_more_often_than_its_dtype_says():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert device_roundoff(torch.float32, cpu) == 2.0**-24
    assert device_roundoff(torch.float32, gpu, arch="gfx1030") == 2.0**-22
    assert device_roundoff(torch.float32, gpu, arch="sm_90", in_attention=True) == 2.0**-11
    assert device_roundoff(torch.float16, gpu, arch="gfx90a") == 2.0**-8
    assert device_roundoff(torch.float16, gpu, arch="gfx942") == 2.0**-11


def test_one_wrong_tile_of_a_large_matrix_is_seen():
    exact = torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0))
    wrong = exact.clone()
    wrong[1000:1016, 64:80] = exact[:16, :16]
    # A two-hundredth of the whole matrix's norm.
    assert float((wrong - exact).norm() / exact.norm()) < 0.02
    assert tile_error(wrong, exact) > 0.3


def test_a_gradient_that_cancels_is_measured_by_what_cancels():
    rounding = 1e-6 * torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert tile_error(rounding, torch.zeros(64)) > 1
    assert tile_error(rounding, torch.zeros(64), least_size=1.0) < 1e-5
    assert tile_error(torch.full((64,), torch.nan), torch.ones(64)) == float("inf")


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


# What is checked, and when


def test_the_small_model_has_the_widths_of_the_run():
    config = tiny_config(
        **CONFIG | {"vocab_size": 151_936 + 3, "num_layers": 6},
        sliding_window=(None, 512, None, 512, None, 512),
        rotary_layers=(True,) * 6,
    )
    small = small_plan(tiny_plan(config=config, data={"sequence_length": 1024})).model.config
    assert (small.hidden_size, small.num_heads, small.num_layers) == (64, 4, 2)
    assert small.sliding_window == (None, 61)  # one layer of each kind, and the window matters
    assert small.vocab_size % 128 == (151_936 + 3) % 128


def test_rates_and_lengths_are_no_reason_to_check_again():
    plan = plan_of()
    identity = identity_of(plan.train.device, None)
    key = key_of(plan, identity)
    assert key_of(plan_of(optimizer={"learning_rate": 1e-5}, train={"steps": 9}), identity) == key
    for other in (
        plan_of(train={"precision": "float16"}),
        plan_of(optimizer={"kind": "muon"}),
        plan_of(model={"attention": "blockwise"}),
        plan_of(config={"hidden_size": 128}),
        plan_of(quantize=Quantize(kind="int8"), adapter=ALL_LINEAR),
    ):
        assert key_of(other, identity) != key


def test_an_answer_holds_for_its_device_and_driver():
    plan = plan_of()
    identity = identity_of(plan.train.device, None)
    keep_answer(key_of(plan, identity), identity, examine(plan))
    assert known_answer(key_of(plan, identity)) is not None
    for name in ("driver", "torch", "arch", "device", "unit"):
        other = replace(identity, **{name: "another"})
        assert known_answer(key_of(plan, other)) is None


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_run_is_checked_once(prepared, tmp_path, monkeypatch):
    plan = tiny_plan(prepared, config=tiny_config(vocab_size=300), train={"steps": 1})
    (checked,) = Run(plan, tmp_path / "first").of(StepChecked)
    assert checked.problem == "" and not checked.from_cache and checked.seconds > 0
    assert checked.torch == torch.__version__

    monkeypatch.setattr(verdicts, "examine", lambda _plan: pytest.fail("checked again"))
    second = Run(plan, tmp_path / "second")
    (checked_again,) = second.of(StepChecked)
    assert checked_again.from_cache
    assert "check" not in [phase.name for phase in second.of(Phase)]


@pytest.mark.usefixtures("checks_the_cpu")
def test_the_check_changes_no_bit_of_a_run(prepared, tmp_path, monkeypatch):
    plan = tiny_plan(
        prepared, config=tiny_config(vocab_size=300, residual_dropout=0.1), train={"steps": 2}
    )
    checked = Run(plan, tmp_path / "checked")
    monkeypatch.setattr(run_start, "is_checked", lambda *_: False)
    unchecked = Run(plan, tmp_path / "unchecked")
    assert unchecked.of(StepChecked) == []
    assert checked.losses() == unchecked.losses()


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_run_on_a_wrong_device_does_not_begin(prepared, tmp_path, sides):
    FAULTS["wrong rotation"][0](sides)
    plan = tiny_plan(prepared, config=tiny_config(vocab_size=300), train={"steps": 1})
    with pytest.raises(WrongNumbers, match="wrong results in rotary positions"):
        Run(plan, tmp_path / "run")
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.usefixtures("checks_the_cpu")
def test_wrong_attention_has_a_fallback(tmp_path, sides):
    FAULTS["swapped heads"][0](sides)
    with pytest.raises(Unsound):
        check_step_of_ranks(plan_of(), tmp_path, lambda _event: None)


@pytest.mark.usefixtures("checks_the_cpu")
def test_a_check_that_is_switched_off_does_nothing(tmp_path, sides):
    FAULTS["wrong rotation"][0](sides)
    events = []
    check_step_of_ranks(plan_of(), tmp_path, events.append, check_step=False)
    assert events == []


@pytest.mark.usefixtures("checks_the_cpu")
def test_different_bits_warn_and_end_a_deterministic_run(tmp_path, sides):
    other_bits(sides)
    events = []
    check_step_of_ranks(plan_of(train={"precision": "bfloat16"}), tmp_path, events.append)
    (warning,) = [event for event in events if isinstance(event, Warned)]
    assert "different bits when it computes attention twice" in warning.reason
    deterministic = plan_of(train={"precision": "bfloat16", "deterministic": True})
    with pytest.raises(WrongNumbers, match="different bits"):
        check_step_of_ranks(deterministic, tmp_path, events.append)


def on_two_ranks(plan_json: str, folder: str) -> list[str]:
    """As two ranks whose second one has a wrong device: the sentences of their errors."""
    plan = RunPlan.model_validate_json(plan_json)
    mesh = replace(join(plan.train), hosts=("n1", "n2"))
    events: list[object] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{folder}/{mesh.rank}")
        patch.setattr(run_start, "is_checked", lambda *_: True)
        if mesh.rank == 1:
            FAULTS["wrong rotation"][0](Sides(patch))
        with pytest.raises(WrongNumbers) as caught:
            check_step_of_ranks(plan, Path(folder), events.append, mesh)
        # What rank 0 says counts: the others were started without the flag.
        check_step_of_ranks(plan, Path(folder), events.append, mesh, check_step=mesh.rank != 0)
    assert caught.value.fix.endswith("start the ranks on other hosts than n2")
    return [caught.value.problem, caught.value.where.partition(",")[0], caught.value.host]


@soak
def test_all_ranks_refuse_alike(tmp_path):
    plan = on_ranks(plan_of(), replicate=2)
    first, second = ranks(2).call(on_two_ranks, plan.model_dump_json(), str(tmp_path))
    assert first == second
    assert "rotary positions" in first[0] and first[1:] == ["rank 1 on n2", "n2"]


@pytest.mark.parametrize("words", [("train", "tiny.yaml"), ("resume", "run")])
def test_the_flag_reaches_the_training_process(words, monkeypatch, tmp_path):
    """From the command line to the arguments of the child."""
    asked = []
    monkeypatch.setattr(lifecycle, "run_to_end", lambda flow, _work: asked.append(flow.check_step))
    monkeypatch.setattr(train_command, "conclude", lambda _run: 0)
    if words[0] == "train":
        monkeypatch.chdir(tmp_path)
        Path("text").mkdir()
        Path("text/a.py").write_text("x = 1\n" * 1000)
        Path("tiny.yaml").write_text(RECIPE)
        result = CliRunner().invoke(train_command.command, [words[1], "--no-check"])
        assert result.exit_code == 0, result.output
        assert asked == [False]
        return
    monkeypatch.setattr(train_command, "find_run", lambda _name: tmp_path)
    monkeypatch.setattr(
        lifecycle, "resume", lambda _folder, **settings: asked.append(settings["check_step"])
    )
    monkeypatch.setattr(train_command, "conclude", lambda _run: 0)
    CliRunner().invoke(train_command.resume_command, [words[1], "--no-check"])
    assert asked == [False]


def test_a_flow_without_the_check_says_so_to_its_child(monkeypatch):
    arguments = []

    class Flow:
        check_step = False
        folder = SimpleNamespace(fallback=Path("/nonexistent/fallback"))

        def stage(self, _stage, given, _environment, _plan):
            arguments.extend(given)
            return SimpleNamespace(code=0)

    monkeypatch.setattr(flow, "training_environment", lambda *_: {})
    machine = read_machine(MACHINES / "laptop-without-a-gpu.json")
    flow.train(Flow(), plan_of(), machine, resumed=True)
    assert arguments == ["--resumed", "--no-check"]


def test_a_cpu_is_not_compared_with_itself(tmp_path):
    events = []
    check_step_of_ranks(plan_of(), tmp_path, events.append)
    assert events == []
