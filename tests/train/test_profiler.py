"""Steps that are recorded and memory that is listed: what is in the files, and that the run does not notice."""

import gzip
import json

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors
from test_out_of_memory import Allocator, run_short_of_memory

from bloomery.monitor.events import Phase, Recovered
from bloomery.train.diagnostics import profiler as profile
from bloomery.train.diagnostics.profile_request import NOT_RECORDED, PROFILE_ASKED, requested_steps
from bloomery.train.diagnostics.profiler import (
    SAVED,
    SAVED_TENSORS_READABLE,
    Live,
    live_tensors,
    memory_page,
)
from bloomery.train.state import build_state
from bloomery.train.step import compute_loss
from device_for_tests import DEVICE

needs_kept = pytest.mark.skipif(
    not SAVED_TENSORS_READABLE, reason="PyTorch 2.9 does not tell what autograd keeps"
)


@pytest.fixture
def plan(prepared):
    # Its time is that of what is recorded: few steps, of one micro-batch.
    train, never = {"steps": 4, "micro_batch_size": 4, "accumulation": 1}, {"every_steps": 99}
    return tiny_plan(prepared, config=CONFIG, train=train, eval=never, checkpoint=never)


def traced(plan, first: int, last: int):
    return plan.model_copy(
        update={"logging": plan.logging.model_copy(update={"profile_steps": (first, last)})}
    )


def test_recorded_steps_leave_a_trace_and_a_list_and_change_no_bit(plan, tmp_path):
    plain = Run(plan, tmp_path / "plain")
    seen = Run(traced(plan, 2, 3), tmp_path / "seen")
    assert seen.losses() == plain.losses()
    assert_same_tensors(seen.tensors(4), plain.tensors(4))
    folder = seen.folder / "profile"
    # PyTorch lists the blocks of the allocator of a GPU.
    blocks = [] if DEVICE == "cpu" else ["step-00000002.memory.json"]
    assert sorted(path.name for path in folder.iterdir()) == [
        *blocks,
        "step-00000002.memory.txt",
        "step-00000002.operators.txt",
        "step-00000002.trace.json.gz",
    ]
    trace = json.loads(gzip.decompress((folder / "step-00000002.trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    per_step = plan.train.accumulation * CONFIG.num_layers
    assert names.count("aten::scaled_dot_product_attention") == 2 * per_step
    assert "[memory]" in names
    assert "aten::mm" in (folder / "step-00000002.operators.txt").read_text()
    phases = [
        (event.step, event.done, event.total) for event in seen.of(Phase) if event.name == "profile"
    ]
    assert phases == [(1, 0, 2), (3, 2, 2)]


def test_checkpointed_blocks_are_not_computed_for_the_list(plan, tmp_path):
    """Asking autograd for a tensor that is to be computed again computes it, and all of its block is in memory."""
    plan = plan.model_copy(
        update={"train": plan.train.model_copy(update={"activation_checkpointing": "full"})}
    )
    plain = Run(plan, tmp_path / "plain")
    seen = Run(traced(plan, 3, 3), tmp_path / "seen")
    assert seen.losses() == plain.losses()
    assert seen.warnings() == plain.warnings() == []
    text = (seen.folder / "profile/step-00000003.memory.txt").read_text()
    assert not [
        line
        for line in text.splitlines()
        if SAVED in line and f" x {CONFIG.intermediate_size} f" in line
    ]
    assert_same_tensors(seen.tensors(4), plain.tensors(4))


def test_memory_is_told_by_what_it_is_for(plan, tmp_path):
    seen = Run(traced(plan, 3, 3), tmp_path)
    text = (seen.folder / "profile/step-00000003.memory.txt").read_text()
    assert text.startswith("step 3, between forward and backward of its first micro-batch")
    weights = sum(
        tensor.nbytes for name, tensor in seen.tensors(4).items() if name.startswith("model/")
    )
    line = next(line for line in text.splitlines() if line.startswith("weights "))
    assert f"{weights / 1024:.1f} KiB" in line
    assert any(line.startswith("optimizer ") for line in text.splitlines())
    assert any(line.startswith(SAVED) for line in text.splitlines()) == SAVED_TENSORS_READABLE
    assert SAVED_TENSORS_READABLE or "not available" in text


@needs_kept
def test_what_autograd_keeps_is_counted_once_and_goes_with_backward(plan, tmp_path):
    state = build_state(plan)
    weight = torch.randn(64, 64, requires_grad=True)
    held = torch.randn(64, 64)
    out = (weight * held).exp().exp()
    kept = [
        live
        for live in live_tensors(state.model_and_optimizer)
        if live.shape == (64, 64) and live.purpose == SAVED
    ]
    # the other factor and both results of exp, of which names hold two as well
    assert len(kept) == 3
    out.sum().backward()
    del out
    left = [
        live
        for live in live_tensors(state.model_and_optimizer)
        if live.shape == (64, 64) and live.purpose == SAVED
    ]
    assert left == []


def test_a_compilers_fake_tensors_are_passed_over(plan):
    """They live on after compiling; one that was asked for its address raised, and there was no list at all."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    state = build_state(plan)
    with FakeTensorMode():
        fake = torch.empty(12345, requires_grad=True)
        made = fake.exp()
    found = live_tensors(state.model_and_optimizer)
    assert all(live.shape != (12345,) for live in found)
    assert sum(live.purpose == "weights" for live in found) == sum(
        1 for _ in state.model_and_optimizer.model.parameters()
    )
    del fake, made


@pytest.mark.parametrize("place", ["forward", "backward", "evaluation"])
def test_full_memory_is_listed_while_it_is_full(plan, tmp_path, place):
    plan = plan.model_copy(
        update={
            "train": plan.train.model_copy(update={"steps": 2}),
            "eval": plan.eval.model_copy(update={"micro_batch_size": 4}),
        }
    )
    others = any(
        live.purpose == SAVED for live in live_tensors(build_state(plan).model_and_optimizer)
    )  # of earlier tests
    short = run_short_of_memory(plan, tmp_path, Allocator(place, rows=4, failures=1))
    (told,) = short.of(Recovered)
    step = 2 if place == "evaluation" else 1
    name = f"profile/step-{step:08d}-full-1.memory.txt"
    assert told.action.endswith(f"; tensors in memory: {name}")
    text = (tmp_path / name).read_text()
    where = "the evaluation after step 2" if place == "evaluation" else "step 1"
    assert text.startswith(f"tensors in memory when {where} ran out of memory")
    kept = any(line.startswith(SAVED) for line in text.splitlines())
    # the forward failed at its first tensor
    assert others or kept == (SAVED_TENSORS_READABLE and place == "backward")


def test_a_wish_is_heard_between_two_steps_and_a_stale_one_is_not(plan, tmp_path, monkeypatch):
    (tmp_path / PROFILE_ASKED).write_text("5")
    listened = profile.Recorder.objective

    def ask_once(self, objective):
        if not (tmp_path / "asked").exists():
            (tmp_path / "asked").touch()
            (tmp_path / PROFILE_ASKED).write_text("2")
        return listened(self, objective)

    monkeypatch.setattr(profile.Recorder, "objective", ask_once)
    run = Run(plan, tmp_path)
    assert [(e.step, e.total) for e in run.of(Phase) if e.name == "profile" and e.done] == [(3, 2)]
    assert not (tmp_path / PROFILE_ASKED).exists()


def test_a_recording_that_cannot_be_written_is_a_warning(plan, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    run = Run(traced(plan, 2, 3), tmp_path)
    assert run.outcome == "done"
    assert {event.reason.partition(":")[0] for event in run.warnings()} == {NOT_RECORDED}


@pytest.mark.parametrize("fault", ["start", "synchronize", "stop"])
def test_a_recording_that_fails_is_switched_off_and_a_warning(plan, tmp_path, monkeypatch, fault):
    """Allocations that are noted to the end of a run cost time in each of its steps."""

    def fail(*_):
        raise RuntimeError("the profiler is in use")

    switched = []
    profiler_class = type(profile.profile())
    running = []
    start, stop = profiler_class.start, profiler_class.stop
    monkeypatch.setattr(profiler_class, "start", lambda self: (start(self), running.append(1)))
    monkeypatch.setattr(profiler_class, "stop", lambda self: (stop(self), running.pop()))
    monkeypatch.setattr(
        profile, "record_memory_history", lambda device, *, is_on: switched.append(is_on)
    )
    if fault == "synchronize":
        monkeypatch.setattr(profile, "synchronize", fail)
    elif fault == "start":
        monkeypatch.setattr(profiler_class, "start", fail)
    else:
        monkeypatch.setattr(
            profiler_class, "stop", lambda self: (stop(self), running.pop(), fail())
        )
    run = Run(traced(plan, 2, 3), tmp_path)
    assert run.outcome == "done"
    assert [event.reason for event in run.warnings()] == [f"{NOT_RECORDED}: the profiler is in use"]
    assert switched == [True, False]
    assert running == []


def test_a_stop_in_the_middle_writes_what_was_seen(plan, tmp_path):
    run = Run(traced(plan, 2, 4), tmp_path, stop_after=2)
    assert run.outcome == "stopped"
    assert (tmp_path / "profile/step-00000002.trace.json.gz").is_file()


@pytest.mark.parametrize(
    ("text", "steps"), [("3", 3), ("500", 20), ("", 0), ("-1", 0), ("many", 0), ("\xb2", 0)]
)
def test_a_wish_that_makes_no_sense_is_none(tmp_path, text, steps):
    (tmp_path / "wish").write_text(text)
    assert requested_steps(tmp_path / "wish") == steps
    assert requested_steps(tmp_path / "nothing") == 0


def test_equal_tensors_are_one_line():
    found = [Live(SAVED, (2, 3), "float32", "cpu", 2**20)] * 3 + [
        Live("weights", (), "float32", "cpu", 4)
    ]
    lines = memory_page(found, "title", "cpu").splitlines()
    assert any(
        line.split()
        == ["saved", "for", "backward:", "2", "x", "3", "float32", "3", "1.0", "MiB", "3.0", "MiB"]
        for line in lines
    )


@needs_kept
def test_a_graph_from_a_real_step_holds_its_activations(plan):
    from bloomery.data.order import Cursor
    from bloomery.train.batch_source import open_loader
    from bloomery.train.objectives.build import build_objective

    state = build_state(plan)
    batch = open_loader(plan.data, "train", seed=plan.train.seed).batch(Cursor(0, 0), 2)
    batch = batch.map_tensors(lambda tensor: tensor.to(DEVICE))
    parts = compute_loss(
        state.model_and_optimizer.model, batch, build_objective(plan), precision="float32"
    )
    kept = [live for live in live_tensors(state.model_and_optimizer) if live.purpose == SAVED]
    wide = [live for live in kept if live.shape[-1:] == (CONFIG.intermediate_size,)]
    assert len(wide) >= 2 * CONFIG.num_layers  # gate and up of each layer at least
    del parts
