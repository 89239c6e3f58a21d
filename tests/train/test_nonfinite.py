import math
from dataclasses import replace

import pytest
import torch
from plans_for_tests import tiny_plan
from runs_of_the_loop import CONFIG, Run, assert_same_tensors

from bloomery.core.errors import UserError
from bloomery.data.loader import Loader
from bloomery.data.order import Cursor
from bloomery.monitor.events import Recovered, StepDone
from bloomery.plan import fallback as safer
from bloomery.train import recover, set_up, state
from bloomery.train.failures import Diverged
from bloomery.train.loop import run
from bloomery.train.objectives.build import pretraining
from bloomery.train.objectives.losses import LossParts
from bloomery.train.objectives.objective import Objective
from bloomery.train.step import LossScale


@pytest.fixture
def plan(prepared):
    parts = {"train": {"steps": 10}, "checkpoint": {"every_steps": 3}, "eval": {"every_steps": 99}}
    return tiny_plan(prepared, config=CONFIG, **parts)


@pytest.fixture
def poison(plan, monkeypatch):
    """Makes the loss NaN whenever a micro-batch holds one of these steps' rows."""
    clean = pretraining(score_chunk=64)

    def poisoned_steps(*steps: int) -> None:
        loader = Loader(plan.data.prepared, sequence_length=32, layout="packed", seed=0)
        bad = [loader.batch(Cursor(0, 4 * (step - 1)), 2).tokens for step in steps]

        def loss(output, batch):
            total, count, *_ = clean.loss(output, batch)
            return LossParts(
                total * math.nan if any(torch.equal(batch.tokens.cpu(), b) for b in bad) else total,
                count,
            )

        monkeypatch.setattr(set_up, "build_objective", lambda *_, **__: Objective(clean.head, loss))

    return poisoned_steps


def test_a_bad_step_is_skipped_told_and_never_printed_as_zero(plan, poison, tmp_path):
    poison(5)
    run = Run(plan, tmp_path / "run")
    losses = run.losses()
    assert losses.pop(5) is None
    assert all(math.isfinite(loss) and loss > 0 for loss in losses.values())
    assert [event.grad_norm for event in run.of(StepDone) if event.step == 5] == [None]
    (warned,) = run.warnings()
    assert "step 5" in warned.reason
    assert "sequences 16 to 19" in warned.reason
    assert all(tensor.isfinite().all() for tensor in run.tensors(10).values())


def test_many_bad_steps_in_a_row_rewind_past_their_data(plan, poison, tmp_path):
    poison(5, 6, 7, 8)
    run = Run(plan, tmp_path / "run")
    (recovered,) = run.of(Recovered)
    assert recovered.step == 3
    assert "sequence 32" in recovered.action
    assert run.outcome == "done"
    assert [event.step for event in run.of(StepDone)] == [*range(1, 9), *range(4, 11)]
    assert all(tensor.isfinite().all() for tensor in run.tensors(10).values())


def test_a_rewind_has_the_time_of_a_save(plan, poison, tmp_path, monkeypatch):
    """It waits for the last save, and checks and reads a checkpoint: minutes, where a step has seconds."""
    poison(5, 6, 7, 8)
    order, found = list[str](), recover.newest_valid
    monkeypatch.setattr(
        recover, "newest_valid", lambda *a, **k: order.append("rewinds") or found(*a, **k)
    )
    run(
        plan,
        run_dir=tmp_path,
        emit=lambda _: None,
        stop=lambda: False,
        before_save=lambda: order.append("extended"),
    )
    # saves, the rewind between them
    assert order[:4] == ["extended", "extended", "rewinds", "extended"]


def test_a_rewind_without_a_checkpoint_starts_the_weights_over(plan, poison, tmp_path):
    poison(1, 2, 3, 4)
    late = plan.model_copy(
        update={"checkpoint": plan.checkpoint.model_copy(update={"every_steps": 99})}
    )
    run = Run(late, tmp_path / "run")
    assert [event.step for event in run.of(Recovered)] == [0]
    assert run.losses()[1] == pytest.approx(math.log(300), abs=0.2)
    assert run.steps_done() == 10


def test_a_run_that_rewound_resumes_bitwise(plan, poison, tmp_path):
    poison(5, 6, 7, 8)
    whole = Run(plan, tmp_path / "whole")
    stopped = False

    class Halted(Run):
        def steps_done(self) -> int:
            nonlocal stopped
            stopped = stopped or (bool(self.of(Recovered)) and self.of(StepDone)[-1].step == 9)
            return 99 if stopped else 0

    first = Halted(plan, tmp_path / "halves", stop_after=50)
    assert first.outcome == "stopped"
    second = Run(plan, tmp_path / "halves", resume_from=first.checkpoint(9))
    assert second.losses() == {10: whole.losses()[10]}
    assert_same_tensors(second.tensors(10), whole.tensors(10))


def test_hopeless_runs_stop_with_the_batch_named_and_their_checkpoint_kept(
    plan, monkeypatch, tmp_path
):
    clean = pretraining(score_chunk=64)
    taken = []

    def loss(output, batch):
        taken.append(1)
        total, count, *_ = clean.loss(output, batch)
        return LossParts(total * (math.nan if len(taken) > 2 * 4 else 1.0), count)

    monkeypatch.setattr(set_up, "build_objective", lambda *_, **__: Objective(clean.head, loss))
    with pytest.raises(UserError, match="sequences 60 to 63"):
        Run(plan, tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert kept == ["step-00000003"]


def test_an_overflow_of_float16_is_no_divergence(plan, tmp_path, monkeypatch):
    half = plan.model_copy(update={"train": plan.train.model_copy(update={"precision": "float16"})})
    monkeypatch.setattr(state, "LossScale", lambda: LossScale(2.0**27))
    run = Run(half, tmp_path / "run")
    skipped = [step for step, loss in run.losses().items() if loss is None]
    assert skipped
    assert skipped == list(range(1, len(skipped) + 1))
    assert run.of(Recovered) == []
    assert all("float16 overflow" in event.reason for event in run.warnings())


def test_float16_that_overflows_without_a_loss_scale_is_no_matter_of_rows(
    plan, tmp_path, monkeypatch
):
    """Finite losses whose gradients overflow at scale 1: nothing is rewound, and the end says that the scale is 1."""
    half = plan.model_copy(update={"train": plan.train.model_copy(update={"precision": "float16"})})
    monkeypatch.setattr(state, "LossScale", lambda: LossScale(4.0))
    clean = pretraining(score_chunk=64)

    def loss(output, batch):
        total, count, *_ = clean.loss(output, batch)
        total.register_hook(lambda gradient: gradient * math.inf)
        return LossParts(total, count)

    monkeypatch.setattr(set_up, "build_objective", lambda *_, **__: Objective(clean.head, loss))
    with pytest.raises(Diverged, match=r"non-finite gradient .* lowering the loss scale to 1"):
        Run(half, tmp_path / "run")


def test_a_wider_precision_goes_on_from_a_checkpoint_of_the_narrow_one(plan, tmp_path):
    """Weights and moments are cast: of float16 they are float32 anyway, of bfloat16-pure bfloat16."""
    for precision, wide in (("float16", "bfloat16"), ("bfloat16-pure", "float32")):
        narrow = plan.model_copy(
            update={"train": plan.train.model_copy(update={"precision": precision})}
        )
        first = Run(narrow, tmp_path / precision, stop_after=3)
        fallback = safer._precise(narrow, wide, "the loss is NaN")
        second = Run(fallback.plan, tmp_path / precision, resume_from=first.checkpoint(3))
        assert second.outcome == "done"
        assert second.losses()[4] == pytest.approx(
            Run(plan, tmp_path / f"{wide}-all").losses()[4], abs=0.05
        )
        assert {
            tensor.dtype for name, tensor in second.tensors(10).items() if "rng" not in name
        } == {torch.float32}


def test_int8_states_and_states_on_the_host_go_on_from_float32_ones(plan, tmp_path):
    # matrices of 4,096 numbers and more
    wide = replace(CONFIG, hidden_size=64, intermediate_size=128)
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"config": wide})})
    first = Run(plan, tmp_path / "run", stop_after=6)
    exact = Run(plan, tmp_path / "exact", resume_from=first.checkpoint(6))
    taken = {
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "offload_activations": True,
    }  # what comes before
    last, home = plan.train.model_copy(update=taken), {"train": plan.train}
    gpu = plan.model_copy(update={"train": last.model_copy(update={"device": "cuda"})})
    hosted = safer.roomier(gpu, "full").plan.model_copy(update=home)
    assert hosted.optimizer.offload
    assert Run(
        hosted, tmp_path / "hosted", resume_from=first.checkpoint(6)
    ).losses() == pytest.approx(exact.losses(), abs=1e-5)
    on_cpu = last.model_copy(update={"device": "cpu"})  # where nothing is sent to the host
    small = safer.roomier(plan.model_copy(update={"train": on_cpu}), "full").plan.model_copy(
        update=home
    )
    run = Run(small, tmp_path / "small", resume_from=first.checkpoint(6))
    assert run.losses() == pytest.approx(exact.losses(), abs=0.02)
    assert any(tensor.dtype == torch.int8 for tensor in run.tensors(10).values())
