"""Memory that runs out in forward, backward, update, evaluation or sampling: the run goes on, and computes the same."""

import math

import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from bloomery.core.errors import UserError
from bloomery.core.units import GIB
from bloomery.hardware import detect as gpu
from bloomery.hardware.detect import GpuProcess, gpu_processes
from bloomery.infer.model_folder import damage
from bloomery.monitor.events import EvalDone, Recovered, Sampled, StepDone
from bloomery.plan.store import read_plan
from bloomery.plan.types import RunPlan
from bloomery.train import loop
from bloomery.train import recover as memory
from bloomery.train.checkpoint import saver as checkpoint
from bloomery.train.optim.build import OptimizersContainer
from bloomery.train.process import out_of_memory


class Allocator(TorchDispatchMode):
    """A device whose memory is too small for tensors of `rows` rows or more, at one place and from one step on."""

    def __init__(self, place: str, rows: int, *, first_step: int = 1, failures: int = 99) -> None:
        super().__init__()
        self.model = None  # until the run is built: before that there is room
        self.place = place
        self.rows = rows
        self.first_step = first_step
        self.failures_left = failures
        self.steps = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and telling Dynamo to look away costs more than the rest of the mode
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (
            self.failures_left
            and self.steps + 1 >= self.first_step
            and self._too_large(result)
            and self._where() == self.place
        ):
            self.failures_left -= 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
            )
        return result

    def _too_large(self, result: object) -> bool:
        return (
            isinstance(result, torch.Tensor) and result.ndim >= 3 and result.shape[0] >= self.rows
        )

    def _where(self) -> str:
        if self.model is None:
            return "building"
        if torch._C._current_autograd_node() is not None:
            return "backward"
        return "forward" if self.model.training else "evaluation"

    def note(self, event) -> None:
        self.steps = event.step if isinstance(event, StepDone) else self.steps


def run_short_of_memory(plan: RunPlan, folder, allocator: Allocator) -> Run:
    real_open_context = loop.open_context

    def open_context(plan, run_dir, emit, resume_from, *positional, **keywords):
        def emit_and_note(event):
            emit(event)
            allocator.note(event)

        context = real_open_context(
            plan, run_dir, emit_and_note, resume_from, *positional, **keywords
        )
        allocator.model = context.state.model_and_optimizer.model
        return context

    with allocator, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "open_context", open_context)
        return Run(plan, folder)


@pytest.fixture
def plan(prepared) -> RunPlan:
    sections = {
        "train": {"steps": 6, "micro_batch_size": 4, "accumulation": 1},
        "model": {"score_chunk": 128},
        "eval": {"every_steps": 99},
        "checkpoint": {"every_steps": 2},
    }
    return tiny_plan(prepared, config=CONFIG, **sections)


def with_smaller_micro_batches(plan: RunPlan, rows: int) -> RunPlan:
    """The plan as it would have been made with smaller micro-batches."""
    train = plan.train.model_copy(update={"micro_batch_size": rows, "accumulation": 4 // rows})
    model = plan.model.model_copy(update={"score_chunk": min(plan.model.score_chunk, rows * 32)})
    return plan.model_copy(update={"train": train, "model": model})


@pytest.mark.parametrize("place", [pytest.param("forward", marks=pytest.mark.soak), "backward"])
def test_a_first_step_that_is_too_large_leaves_no_trace(plan, tmp_path, place):
    """Bitwise, dropout and all: the run is the one that had the smaller micro-batch from the start."""
    recovered_run = run_short_of_memory(plan, tmp_path / "short", Allocator(place, rows=2))
    small_run = Run(with_smaller_micro_batches(plan, 1), tmp_path / "small")
    assert [event.step for event in recovered_run.of(Recovered)] == [0, 0]
    assert recovered_run.losses() == small_run.losses()
    assert_same_tensors(recovered_run.tensors(6), small_run.tensors(6))
    recovery = recovered_run.of(Recovered)[0]
    assert recovery.reason == "out of memory at step 1 (2.50 GiB allocation failed)"
    assert recovery.action == (
        "micro-batch 4 -> 2, gradient accumulation 1 -> 2; tokens per step unchanged"
        "; tensors in memory: profile/step-00000001-full-1.memory.txt"
    )
    stored_plan = read_plan(tmp_path / "short/plan.json")
    assert (
        stored_plan.train.micro_batch_size,
        stored_plan.train.accumulation,
        stored_plan.train.tokens_per_step,
    ) == (1, 4, 128)
    assert stored_plan.model.score_chunk == 32
    (decision,) = [
        decision for decision in stored_plan.choices if decision.key == "train.micro_batch_size"
    ]
    assert decision.value == "1"
    assert "out of memory" in decision.reason


@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.soak)])
def test_a_later_step_goes_on_as_if_resumed_with_the_smaller_micro_batch(plan, tmp_path, place):
    """Bitwise against a run that was stopped there and resumed with a plan of smaller micro-batches."""
    recovered_run = run_short_of_memory(
        plan, tmp_path / "short", Allocator(place, rows=4, first_step=4)
    )
    stopped = Run(plan, tmp_path / "halves", stop_after=3)
    resumed = Run(
        with_smaller_micro_batches(plan, 2), tmp_path / "halves", resume_from=stopped.checkpoint(3)
    )
    assert [event.step for event in recovered_run.of(Recovered)] == [3]
    assert list(recovered_run.losses()) == [1, 2, 3, 4, 5, 6]
    assert recovered_run.losses() == stopped.losses() | resumed.losses()
    assert_same_tensors(recovered_run.tensors(6), resumed.tensors(6))


def test_without_dropout_the_mathematics_do_not_depend_on_the_micro_batch(prepared, tmp_path, plan):
    """Equal up to the order of sums, R15's 1e-6."""
    plan_without_dropout = plan.model_copy(
        update={"model": plan.model.model_copy(update={"config": tiny_config(vocab_size=300)})}
    )
    recovered_run = run_short_of_memory(
        plan_without_dropout, tmp_path / "short", Allocator("backward", rows=4, first_step=3)
    )
    undisturbed = Run(plan_without_dropout, tmp_path / "whole")
    for step, loss in undisturbed.losses().items():
        assert math.isclose(recovered_run.losses()[step], loss, abs_tol=1e-6), step


def test_a_resumed_run_keeps_the_smaller_micro_batch(plan, tmp_path):
    recovered_run = run_short_of_memory(plan, tmp_path / "run", Allocator("forward", rows=4))
    resumed = Run(
        read_plan(tmp_path / "run/plan.json"),
        tmp_path / "run",
        resume_from=recovered_run.checkpoint(4),
    )
    assert resumed.losses() == {
        step: loss for step, loss in recovered_run.losses().items() if step > 4
    }
    assert resumed.of(Recovered) == []


@pytest.mark.parametrize("failing_update", [1, 5])
def test_an_update_that_was_cut_short_is_taken_back(plan, tmp_path, monkeypatch, failing_update):
    """Half of the weights have moved: nothing but a checkpoint, or the start, is whole."""
    updates = []
    real_step = OptimizersContainer.step

    def failing_step(
        self: OptimizersContainer, lr_scale: float, *, gradient_factor: float = 1.0
    ) -> None:
        updates.append(lr_scale)
        if len(updates) == failing_update:
            for parameter in self.parameters[: len(self.parameters) // 2]:
                parameter.data.add_(1.0)
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB.")
        real_step(self, lr_scale, gradient_factor=gradient_factor)

    monkeypatch.setattr(OptimizersContainer, "step", failing_step)
    recovered_run = Run(plan, tmp_path / "short")
    (recovery,) = recovered_run.of(Recovered)
    resumed_step = 0 if failing_update == 1 else 4
    assert recovery.step == resumed_step
    assert f"resumes from step {resumed_step}" in recovery.action
    if failing_update == 1:
        small_run = Run(with_smaller_micro_batches(plan, 2), tmp_path / "calm")
        assert recovered_run.losses() == small_run.losses()
        assert_same_tensors(recovered_run.tensors(6), small_run.tensors(6))
    else:
        stopped = Run(plan, tmp_path / "halves", stop_after=4)
        resumed = Run(
            with_smaller_micro_batches(plan, 2),
            tmp_path / "halves",
            resume_from=stopped.checkpoint(4),
        )
        assert_same_tensors(recovered_run.tensors(6), resumed.tensors(6))


def test_an_evaluation_that_is_too_large_is_made_in_smaller_parts(prepared, tmp_path):
    sections = {"eval": {"every_steps": 3, "micro_batch_size": 8}}
    plan = tiny_plan(
        prepared, config=CONFIG, train={"micro_batch_size": 2, "accumulation": 2}, **sections
    )
    recovered_run = run_short_of_memory(plan, tmp_path / "short", Allocator("evaluation", rows=4))
    undisturbed = Run(plan, tmp_path / "whole")
    assert len(recovered_run.of(Recovered)) == 2
    assert recovered_run.of(Recovered)[-1].action.startswith(
        "evaluation micro-batch 4 -> 2; same result; tensors in memory"
    )
    assert recovered_run.losses() == undisturbed.losses()
    assert_same_tensors(recovered_run.tensors(6), undisturbed.tensors(6))
    for evaluation, undisturbed_evaluation in zip(
        recovered_run.of(EvalDone), undisturbed.of(EvalDone), strict=True
    ):
        assert evaluation.loss == pytest.approx(undisturbed_evaluation.loss, abs=1e-6)
        assert evaluation.tokens == undisturbed_evaluation.tokens
    assert read_plan(tmp_path / "short/plan.json").eval.micro_batch_size == 2


def test_an_evaluation_without_room_for_one_row_is_left_out_and_said(plan, tmp_path):
    evaluations = {"every_steps": 3}
    sample = {"prompts": ("def f",)}
    evaluating_plan = plan.model_copy(
        update={
            "eval": plan.eval.model_copy(update=evaluations),
            "sample": plan.sample.model_copy(update=sample),
        }
    )
    run = run_short_of_memory(evaluating_plan, tmp_path / "short", Allocator("evaluation", rows=1))
    assert run.outcome == "done"
    assert run.of(EvalDone) == run.of(Sampled) == []
    reasons = [event.reason for event in run.warnings()]
    assert (
        "out of memory in the evaluation after step 3 (2.50 GiB allocation failed), "
        "micro-batch 1: no validation loss" in reasons
    )
    assert (
        "out of memory while sampling after step 3; samples are missing (2.50 GiB allocation failed)"
        in reasons
    )


def test_a_single_row_that_does_not_fit_ends_the_run_with_remedies(plan, tmp_path):
    suggestions = ("train.micro_batch_size=1", "train.activation_checkpointing=full")
    plan_with_suggestions = plan.model_copy(update={"suggestions": suggestions})
    with pytest.raises(memory.OutOfMemory, match="micro-batch 1 of 32 tokens") as caught:
        run_short_of_memory(
            plan_with_suggestions, tmp_path / "run", Allocator("forward", rows=1, first_step=4)
        )
    assert "train.activation_checkpointing=full" in caught.value.fix
    assert "micro_batch_size=1" not in caught.value.fix
    assert damage(tmp_path / "run/checkpoints/step-00000003") is None  # nothing is lost
    with pytest.raises(UserError) as error_without_suggestions:
        run_short_of_memory(plan, tmp_path / "other", Allocator("forward", rows=1))
    assert (
        "train.activation_checkpointing=full or optimizer.kind=adafactor"
        in error_without_suggestions.value.fix
    )


def test_memory_that_is_too_full_to_copy_a_checkpoint_costs_time_but_no_checkpoint(
    plan, tmp_path, monkeypatch
):
    real_on_cpu = checkpoint.on_cpu

    def on_cpu(tensors, *, copy):
        if copy:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: ..."
            )
        return real_on_cpu(tensors, copy=copy)

    monkeypatch.setattr(checkpoint, "on_cpu", on_cpu)
    plan_with_async_save = plan.model_copy(
        update={"checkpoint": plan.checkpoint.model_copy(update={"async_save": True})}
    )
    run = Run(plan_with_async_save, tmp_path / "run")
    assert run.outcome == "done"
    assert run.checkpoint(6).is_dir()
    (warning,) = run.warnings()
    assert "checkpoints are now written synchronously" in warning.reason


def test_what_counts_as_full_memory():
    with pytest.raises(RuntimeError) as allocation_error:
        torch.empty(2**62, dtype=torch.uint8)
    assert out_of_memory(allocation_error.value)
    assert memory._requested_size(str(allocation_error.value)) == f"{2**62 / 2**40:.1f} TiB"
    for text in (
        "CUDA error: out of memory",
        "HIP error: out of memory",
        "HIP out of memory. Tried to allocate 2.00 GiB",
        "hipErrorOutOfMemory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling",
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory",
        "[Errno 12] Cannot allocate memory",
        "std::bad_alloc",
    ):
        assert out_of_memory(RuntimeError(text))
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("HIP error: an illegal memory access was encountered"))
    assert not out_of_memory(RuntimeError("shape '[2, 3]' is invalid for input of size 7"))


def test_other_errors_pass_through(plan, tmp_path, monkeypatch):
    def raise_error(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loop, "train_step", raise_error)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Run(plan, tmp_path / "run")


def test_who_else_uses_the_gpu_is_named(tmp_path, monkeypatch):
    for pid, name, size in ((77, "blender", 3 * GIB), (78, "firefox", GIB // 2)):
        folder = tmp_path / f"sys/class/kfd/kfd/proc/{pid}"
        folder.mkdir(parents=True)
        (folder / "vram_4711").write_text(f"{size}\n")
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n")
    monkeypatch.setattr(gpu, "output_of", lambda *_, **__: "91, 1024\n92, [N/A]\nnot a line\n")
    processes = gpu_processes(tmp_path / "sys", tmp_path / "proc")
    assert processes == (
        GpuProcess(77, "blender", 3 * GIB),
        GpuProcess(91, "unknown", GIB),
        GpuProcess(78, "firefox", GIB // 2),
    )
    sentence = memory.other_processes(processes[:1], others=4 * GIB, total=12 * GIB)
    assert sentence == (
        "; other processes use 4.0 GiB of this GPU's 12.0 GiB (on all GPUs: blender (process 77) 3.0 GiB)"
    )
    assert memory.other_processes((), others=GIB // 2, total=12 * GIB) == ""


def test_a_step_whose_optimizer_is_in_backward_is_not_cut(plan, tmp_path):
    """Half of it may have moved: nothing of it is saved, and the error says which smaller step to start again with."""
    fused_optimizer = plan.optimizer.model_copy(
        update={"kind": "adafactor", "fused_backward": True}
    )
    allocator = Allocator("backward", 4, first_step=4)
    with pytest.raises(UserError, match="a fused backward cannot accumulate") as error:
        run_short_of_memory(
            plan.model_copy(update={"optimizer": fused_optimizer}), tmp_path / "run", allocator
        )
    assert "train.micro_batch_size=2 train.tokens_per_step=64" in error.value.fix
    assert damage(tmp_path / "run" / "checkpoints" / "step-00000002") is None
    assert not (tmp_path / "run" / "checkpoints" / "step-00000003").exists()
