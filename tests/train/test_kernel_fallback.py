"""A Triton kernel that fails: a run whose plan chose it goes on with blockwise attention, with the numbers of that.

Oracle: the run that had blockwise attention from the start. Without a Triton the failure is a real one.
"""

import sys
from dataclasses import replace

import pytest
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors

from bloomery.core.errors import UserError
from bloomery.model.attention import attend, triton_attention
from bloomery.model.attention.attend import DocumentLayout
from bloomery.model.attention.blockwise import Options, reach_of
from bloomery.model.attention.triton_attention import KernelFailed
from bloomery.monitor.events import EvalDone, Recovered, Sampled
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.train import loop
from bloomery.train.failures import KernelUnusable, Unsound

MESSAGE = "the Triton kernel forward failed: OutOfResources: out of resource: shared memory"


@pytest.fixture
def no_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(sys.modules, "bloomery.model.attention.triton_kernels", None)
    triton_attention._kernels.cache_clear()


def plan_with(prepared, attention: str, **model) -> RunPlan:
    return tiny_plan(
        prepared,
        config=CONFIG,
        train={"steps": 6, "accumulation": 1},
        model={"attention": attention, **model},
        checkpoint={"every_steps": 2},
        eval={"every_steps": 3},
        sample={"prompts": ("def f", "class A")},
    )


class FailingKernel:
    """Blockwise attention in place of the kernels, which fail at one place from a step on.

    Places: "forward", "backward", "evaluation", "sampling" (the kernel for decoding).
    """

    def __init__(self, place: str, step: int, message: str = MESSAGE) -> None:
        self.place, self.step, self.message = place, step, message
        self.context = None

    def fail(self, place: str) -> None:
        # Before the run is open its kernels are checked.
        if self.context is None or self.context.step + 1 < self.step:
            return
        if place == self.place:
            raise KernelFailed(self.message)

    def __call__(self, q, k, v, layout, options):
        layout = replace(layout, reach=reach_of(layout.first_BT))
        out = attend._blockwise(q, k, v, layout, options)
        if self.context is not None:
            self.fail("forward" if self.context.model.training else "evaluation")
        if out.requires_grad:
            out.register_hook(lambda _gradient: self.fail("backward"))
        return out

    def decode(self, q, k, v, num_keys_B, softcap, scale):
        assert num_keys_B is None, "samples have one length"
        self.fail("sampling")
        return attend._math(q, k, v, DocumentLayout(), Options(None, softcap, scale, 0.0))


def run_with(kernel: FailingKernel, plan: RunPlan, folder, monkeypatch, **options) -> Run:
    opened = loop.open_context

    def open_context(*args, **named):
        kernel.context = opened(*args, **named)
        return kernel.context

    with monkeypatch.context() as patch:
        patch.setattr(loop, "open_context", open_context)
        patch.setitem(attend._BACKENDS, "triton", kernel)
        patch.setattr(attend, "triton_decode", kernel.decode)
        return Run(plan, folder, **options)


def test_without_a_triton_a_run_is_the_blockwise_one(prepared, tmp_path, no_triton):
    """The check before the first step finds out; nothing of the run differs, a resume included."""
    run = Run(plan_with(prepared, "triton"), tmp_path / "run", stop_after=4)
    (event,) = run.of(Recovered)
    assert event.step == 0
    assert "ModuleNotFoundError" in event.reason
    assert event.action == "attention triton -> blockwise; slower"

    stored = read_plan(tmp_path / "run/plan.json")
    assert stored.model.attention == "blockwise"
    assert stored.recovered == ("model.attention",)
    resumed = Run(stored, tmp_path / "run", resume_from=run.checkpoint(4))
    assert resumed.of(Recovered) == []
    plain = Run(plan_with(prepared, "blockwise"), tmp_path / "plain")
    assert run.losses() | resumed.losses() == plain.losses()
    assert_same_tensors(resumed.tensors(6), plain.tensors(6))


@pytest.mark.parametrize("place", ["forward", "backward", "evaluation", "sampling"])
def test_a_step_is_repeated_with_the_same_random_numbers(
    prepared, tmp_path, monkeypatch, no_triton, place
):
    """Bitwise, dropout and all: from step 4 on, the run is blockwise; before, its kernels compute the same here."""
    plan = plan_with(prepared, "triton")
    kernel = FailingKernel(place, 4)
    run = run_with(kernel, plan, tmp_path / "run", monkeypatch)
    (event,) = run.of(Recovered)
    assert MESSAGE in event.reason
    assert event.step == 3
    assert read_plan(tmp_path / "run/plan.json").model.attention == "blockwise"

    plain = Run(plan_with(prepared, "blockwise"), tmp_path / "plain")
    assert run.losses() == plain.losses()
    assert_same_tensors(run.tensors(6), plain.tensors(6))
    of_run, of_plain = ([event.loss for event in each.of(EvalDone)] for each in (run, plain))
    assert of_run == of_plain
    # Each prompt once, although the kernel for decoding may have failed at any of them.
    assert [(event.step, event.prompt) for event in run.of(Sampled)] == [
        (event.step, event.prompt) for event in plain.of(Sampled)
    ]


def test_an_update_in_backward_that_was_interrupted_is_taken_back(
    prepared, tmp_path, monkeypatch, no_triton
):
    """Layers above the kernel have moved: the run goes on from its checkpoint."""
    plan = plan_with(prepared, "triton")
    optimizer = plan.optimizer.model_copy(update={"fused_backward": True})
    plan = plan.model_copy(update={"optimizer": optimizer})
    run = run_with(FailingKernel("backward", 4), plan, tmp_path / "run", monkeypatch)
    (event,) = run.of(Recovered)
    assert event.step == 2
    assert event.action.endswith("the update was incomplete: resumes from step 2")
    plain = plan.model_copy(
        update={"model": plan.model.model_copy(update={"attention": "blockwise"})}
    )
    assert run.losses() == Run(plain, tmp_path / "plain").losses()


def test_a_kernel_that_the_recipe_asks_for_stops_the_run(
    prepared, tmp_path, monkeypatch, no_triton
):
    plan = plan_with(prepared, "triton", attention_is_set=True)
    with pytest.raises(KernelUnusable, match="ModuleNotFoundError") as caught:
        Run(plan, tmp_path / "run")
    assert caught.value.where == "train.attention=triton"
    assert "set train.attention=blockwise" in caught.value.fix
    with pytest.raises(KernelUnusable, match="shared memory"):
        run_with(FailingKernel("backward", 2), plan, tmp_path / "later", monkeypatch)


def test_wrong_numbers_of_the_kernels_are_no_reason_to_stop(
    prepared, tmp_path, monkeypatch, no_triton
):
    plan = plan_with(prepared, "triton")
    kernel = FailingKernel("forward", 99)

    def wrong(*inputs):
        return kernel(*inputs) * 1.5

    with monkeypatch.context() as patch:
        patch.setitem(attend._BACKENDS, "triton", wrong)
        run = Run(plan, tmp_path / "run", stop_after=1)
        (event,) = run.of(Recovered)
        assert "wrong results of triton attention" in event.reason
        asked = plan_with(prepared, "triton", attention_is_set=True)
        with pytest.raises(Unsound, match="wrong results of triton attention"):
            Run(asked, tmp_path / "asked")
    plain = Run(plan_with(prepared, "blockwise"), tmp_path / "plain", stop_after=1)
    assert run.losses() == plain.losses()


def test_out_of_memory_is_no_failure_of_a_kernel(prepared, tmp_path, monkeypatch, no_triton):
    """A driver without memory for a kernel: the micro-batch is halved, and the kernels stay."""
    message = (
        "the Triton kernel backward_kv failed: RuntimeError: Triton Error [HIP]: out of memory"
    )
    kernel = FailingKernel("backward", 4, message)
    plan = plan_with(prepared, "triton")
    run = None
    with pytest.raises(UserError, match="out of memory at step 4"):
        run = run_with(kernel, plan, tmp_path / "run", monkeypatch)
    assert run is None
    stored = read_plan(tmp_path / "run/plan.json")
    assert stored.model.attention == "triton"
    assert stored.train.micro_batch_size == 1
