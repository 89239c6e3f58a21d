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

    def __init__(self, place: str, rows: int, *, since: int = 1, times: int = 99) -> None:
        super().__init__()
        self.model = None  # until the run is built: before that there is room
        self.place, self.rows, self.since, self.left, self.steps = place, rows, since, times, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled here, and telling Dynamo to look away costs more than the rest of the mode
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if (
            self.left
            and self.steps + 1 >= self.since
            and self._too_large(made)
            and self._where() == self.place
        ):
            self.left -= 1
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has ..."
            )
        return made

    def _too_large(self, made: object) -> bool:
        return isinstance(made, torch.Tensor) and made.ndim >= 3 and made.shape[0] >= self.rows

    def _where(self) -> str:
        if self.model is None:
            return "building"
        if torch._C._current_autograd_node() is not None:
            return "backward"
        return "forward" if self.model.training else "evaluation"

    def note(self, event) -> None:
        self.steps = event.step if isinstance(event, StepDone) else self.steps


def run_short_of_memory(plan: RunPlan, folder, allocator: Allocator) -> Run:
    opened = loop.open_context

    def open_context(plan, run_dir, emit, resume_from, *rest, **named):
        noted = lambda event: (emit(event), allocator.note(event))  # noqa: E731
        context = opened(plan, run_dir, noted, resume_from, *rest, **named)
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


def cut(plan: RunPlan, rows: int) -> RunPlan:
    """The plan as it would have been made with smaller micro-batches."""
    train = plan.train.model_copy(update={"micro_batch_size": rows, "accumulation": 4 // rows})
    model = plan.model.model_copy(update={"score_chunk": min(plan.model.score_chunk, rows * 32)})
    return plan.model_copy(update={"train": train, "model": model})


@pytest.mark.parametrize("place", [pytest.param("forward", marks=pytest.mark.soak), "backward"])
def test_a_first_step_that_is_too_large_leaves_no_trace(plan, tmp_path, place):
    """Bitwise, dropout and all: the run is the one that had the smaller micro-batch from the start."""
    short = run_short_of_memory(plan, tmp_path / "short", Allocator(place, rows=2))
    small = Run(cut(plan, 1), tmp_path / "small")
    assert [event.step for event in short.of(Recovered)] == [0, 0]
    assert short.losses() == small.losses()
    assert_same_tensors(short.tensors(6), small.tensors(6))
    told = short.of(Recovered)[0]
    assert told.reason == "out of memory at step 1 (2.50 GiB allocation failed)"
    assert told.action == (
        "micro-batch 4 -> 2, gradient accumulation 1 -> 2; tokens per step unchanged"
        "; tensors in memory: profile/step-00000001-full-1.memory.txt"
    )
    stored = read_plan(tmp_path / "short/plan.json")
    assert (
        stored.train.micro_batch_size,
        stored.train.accumulation,
        stored.train.tokens_per_step,
    ) == (1, 4, 128)
    assert stored.model.score_chunk == 32
    (decision,) = [
        decision for decision in stored.choices if decision.key == "train.micro_batch_size"
    ]
    assert decision.value == "1"
    assert "out of memory" in decision.reason


@pytest.mark.parametrize("place", ["forward", pytest.param("backward", marks=pytest.mark.soak)])
def test_a_later_step_goes_on_as_if_resumed_with_the_smaller_micro_batch(plan, tmp_path, place):
    """Bitwise against a run that was stopped there and resumed with a plan of smaller micro-batches."""
    short = run_short_of_memory(plan, tmp_path / "short", Allocator(place, rows=4, since=4))
    first = Run(plan, tmp_path / "halves", stop_after=3)
    second = Run(cut(plan, 2), tmp_path / "halves", resume_from=first.checkpoint(3))
    assert [event.step for event in short.of(Recovered)] == [3]
    assert list(short.losses()) == [1, 2, 3, 4, 5, 6]
    assert short.losses() == first.losses() | second.losses()
    assert_same_tensors(short.tensors(6), second.tensors(6))


def test_without_dropout_the_mathematics_do_not_depend_on_the_micro_batch(prepared, tmp_path, plan):
    """Equal up to the order of sums, R15's 1e-6."""
    plain = plan.model_copy(
        update={"model": plan.model.model_copy(update={"config": tiny_config(vocab_size=300)})}
    )
    short = run_short_of_memory(plain, tmp_path / "short", Allocator("backward", rows=4, since=3))
    whole = Run(plain, tmp_path / "whole")
    for step, loss in whole.losses().items():
        assert math.isclose(short.losses()[step], loss, abs_tol=1e-6), step


def test_a_resumed_run_keeps_the_smaller_micro_batch(plan, tmp_path):
    short = run_short_of_memory(plan, tmp_path / "run", Allocator("forward", rows=4))
    again = Run(
        read_plan(tmp_path / "run/plan.json"), tmp_path / "run", resume_from=short.checkpoint(4)
    )
    assert again.losses() == {step: loss for step, loss in short.losses().items() if step > 4}
    assert again.of(Recovered) == []


@pytest.mark.parametrize("at", [1, 5])
def test_an_update_that_was_cut_short_is_taken_back(plan, tmp_path, monkeypatch, at):
    """Half of the weights have moved: nothing but a checkpoint, or the start, is whole."""
    updates = []
    whole_step = OptimizersContainer.step

    def torn(self: OptimizersContainer, lr_scale: float) -> None:
        updates.append(lr_scale)
        if len(updates) == at:
            for parameter in self.parameters[: len(self.parameters) // 2]:
                parameter.data.add_(1.0)
            raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 20.00 MiB.")
        whole_step(self, lr_scale)

    monkeypatch.setattr(OptimizersContainer, "step", torn)
    short = Run(plan, tmp_path / "short")
    (told,) = short.of(Recovered)
    back = 0 if at == 1 else 4
    assert told.step == back
    assert f"resumes from step {back}" in told.action
    if at == 1:
        calm = Run(cut(plan, 2), tmp_path / "calm")
        assert short.losses() == calm.losses()
        assert_same_tensors(short.tensors(6), calm.tensors(6))
    else:
        first = Run(plan, tmp_path / "halves", stop_after=4)
        second = Run(cut(plan, 2), tmp_path / "halves", resume_from=first.checkpoint(4))
        assert_same_tensors(short.tensors(6), second.tensors(6))


def test_an_evaluation_that_is_too_large_is_made_in_smaller_parts(prepared, tmp_path):
    looks = {"eval": {"every_steps": 3, "micro_batch_size": 8}}
    plan = tiny_plan(
        prepared, config=CONFIG, train={"micro_batch_size": 2, "accumulation": 2}, **looks
    )
    short = run_short_of_memory(plan, tmp_path / "short", Allocator("evaluation", rows=4))
    whole = Run(plan, tmp_path / "whole")
    assert len(short.of(Recovered)) == 2
    assert short.of(Recovered)[-1].action.startswith(
        "evaluation micro-batch 4 -> 2; same result; tensors in memory"
    )
    assert short.losses() == whole.losses()
    assert_same_tensors(short.tensors(6), whole.tensors(6))
    for ours, theirs in zip(short.of(EvalDone), whole.of(EvalDone), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.tokens == theirs.tokens
    assert read_plan(tmp_path / "short/plan.json").eval.micro_batch_size == 2


def test_an_evaluation_without_room_for_one_row_is_left_out_and_said(plan, tmp_path):
    looks, sample = {"every_steps": 3}, {"prompts": ("def f",)}
    eval_mode = plan.model_copy(
        update={
            "eval": plan.eval.model_copy(update=looks),
            "sample": plan.sample.model_copy(update=sample),
        }
    )
    short = run_short_of_memory(eval_mode, tmp_path / "short", Allocator("evaluation", rows=1))
    assert short.outcome == "done"
    assert short.of(EvalDone) == short.of(Sampled) == []
    told = [event.reason for event in short.warnings()]
    assert (
        "out of memory in the evaluation after step 3 (2.50 GiB allocation failed), "
        "micro-batch 1: no validation loss" in told
    )
    assert (
        "out of memory while sampling after step 3; samples are missing (2.50 GiB allocation failed)"
        in told
    )


def test_a_single_row_that_does_not_fit_ends_the_run_with_remedies(plan, tmp_path):
    suggestions = ("train.micro_batch_size=1", "train.activation_checkpointing=full")
    advised = plan.model_copy(update={"suggestions": suggestions})
    with pytest.raises(memory.OutOfMemory, match="micro-batch 1 of 32 tokens") as caught:
        run_short_of_memory(advised, tmp_path / "run", Allocator("forward", rows=1, since=4))
    assert "train.activation_checkpointing=full" in caught.value.fix
    assert "micro_batch_size=1" not in caught.value.fix
    assert damage(tmp_path / "run/checkpoints/step-00000003") is None  # nothing is lost
    with pytest.raises(UserError) as unforeseen:
        run_short_of_memory(plan, tmp_path / "other", Allocator("forward", rows=1))
    assert "train.activation_checkpointing=full or optimizer.kind=adafactor" in unforeseen.value.fix


def test_memory_that_is_too_full_to_copy_a_checkpoint_costs_time_but_no_checkpoint(
    plan, tmp_path, monkeypatch
):
    real = checkpoint.on_cpu

    def on_cpu(tensors, *, copy):
        if copy:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:126] DefaultCPUAllocator: can't allocate memory: ..."
            )
        return real(tensors, copy=copy)

    monkeypatch.setattr(checkpoint, "on_cpu", on_cpu)
    eager = plan.model_copy(
        update={"checkpoint": plan.checkpoint.model_copy(update={"async_save": True})}
    )
    run = Run(eager, tmp_path / "run")
    assert run.outcome == "done"
    assert run.checkpoint(6).is_dir()
    (warned,) = run.warnings()
    assert "checkpoints are now written synchronously" in warned.reason


def test_what_counts_as_full_memory():
    with pytest.raises(RuntimeError) as real:
        torch.empty(2**62, dtype=torch.uint8)
    assert out_of_memory(real.value)
    assert memory._requested_size(str(real.value)) == f"{2**62 / 2**40:.1f} TiB"
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
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loop, "train_step", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Run(plan, tmp_path / "run")


def test_who_else_uses_the_gpu_is_named(tmp_path, monkeypatch):
    for pid, name, size in ((77, "blender", 3 * GIB), (78, "firefox", GIB // 2)):
        held = tmp_path / f"sys/class/kfd/kfd/proc/{pid}"
        held.mkdir(parents=True)
        (held / "vram_4711").write_text(f"{size}\n")
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/comm").write_text(f"{name}\n")
    monkeypatch.setattr(gpu, "output_of", lambda *_, **__: "91, 1024\n92, [N/A]\nnot a line\n")
    found = gpu_processes(tmp_path / "sys", tmp_path / "proc")
    assert found == (
        GpuProcess(77, "blender", 3 * GIB),
        GpuProcess(91, "unknown", GIB),
        GpuProcess(78, "firefox", GIB // 2),
    )
    said = memory.other_processes(found[:1], others=4 * GIB, total=12 * GIB)
    assert said == (
        "; other processes use 4.0 GiB of this GPU's 12.0 GiB (on all GPUs: blender (process 77) 3.0 GiB)"
    )
    assert memory.other_processes((), others=GIB // 2, total=12 * GIB) == ""


def test_a_step_whose_optimizer_is_in_backward_is_not_cut(plan, tmp_path):
    """Half of it may have moved: nothing of it is saved, and the error says which smaller step to start again with."""
    inside = plan.optimizer.model_copy(update={"kind": "adafactor", "fused_backward": True})
    short = Allocator("backward", 4, since=4)
    with pytest.raises(UserError, match="a fused backward cannot accumulate") as error:
        run_short_of_memory(plan.model_copy(update={"optimizer": inside}), tmp_path / "run", short)
    assert "train.micro_batch_size=2 train.tokens_per_step=64" in error.value.fix
    assert damage(tmp_path / "run" / "checkpoints" / "step-00000002") is None
    assert not (tmp_path / "run" / "checkpoints" / "step-00000003").exists()
