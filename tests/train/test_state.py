import pytest
import torch
from plans_for_tests import tiny_config, tiny_plan

from bloomery.data.order import Cursor
from bloomery.model.io.weights import write_model
from bloomery.train.checkpoint.saver import Saver
from bloomery.train.state import RunProgress, build_state, restore


def worked_on(plan):
    """A state that differs from a fresh one in every part."""
    state = build_state(plan)
    for number, parameter in enumerate(state.model_and_optimizer.optimizer.parameters):
        parameter.grad = torch.full_like(parameter, 0.01 * (number + 1))
    state.model_and_optimizer.optimizer.step(1.0)
    state.cursor = Cursor(plan.train.seed, 24)
    state.progress = RunProgress(
        step=6, tokens=768, best_loss=4.5, evaluations_since_best=1, best_step=4
    )
    state.non_finite.decide(False, step=6, sequences=range(20, 24))
    if state.model_and_optimizer.loss_scale is not None:
        state.model_and_optimizer.loss_scale.update(finite=False)
    return state


def saved(state, folder):
    Saver(folder, 3, False, writer=state.checkpointed_model.writer).save(
        6, state.parts(), state.scalars()
    )
    return folder / "step-00000006"


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16-pure"])
def test_a_checkpoint_brings_everything_back(precision, tmp_path):
    plan = tiny_plan(train={"precision": precision}, optimizer={"kind": "muon"})
    state = worked_on(plan)
    folder = saved(state, tmp_path)
    restored = build_state(plan, resume_from=folder)
    assert restored.scalars() == state.scalars()
    for part in ("model", "optimizer"):
        restored_tensors = restored.parts()[part]
        saved_tensors = state.parts()[part]
        assert restored_tensors.keys() == saved_tensors.keys()
        differing_names = [
            name
            for name, tensor in saved_tensors.items()
            if not torch.equal(restored_tensors[name], tensor)
        ]
        assert differing_names == []


def test_going_back_without_a_checkpoint_is_how_the_run_began():
    plan = tiny_plan(optimizer={"kind": "muon"})
    fresh = build_state(plan)
    state = worked_on(plan)
    restore(state, None)
    assert state.progress == RunProgress()
    assert state.model_and_optimizer.optimizer.named_tensors() == {}
    pairs = zip(
        state.model_and_optimizer.model.parameters(),
        fresh.model_and_optimizer.model.parameters(),
        strict=True,
    )
    assert all(torch.equal(parameter, fresh_parameter) for parameter, fresh_parameter in pairs)


def test_nothing_is_left_on_the_meta_device_and_tied_weights_stay_tied():
    model = build_state(tiny_plan()).model_and_optimizer.model
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_training_starts_from_pretrained_weights(tmp_path):
    config = tiny_config()
    model = build_state(tiny_plan(train={"seed": 5})).model_and_optimizer.model
    write_model(dict(model.named_parameters()), config, tmp_path)
    started_model = build_state(tiny_plan(model={"source": tmp_path})).model_and_optimizer.model
    assert all(
        torch.equal(started_parameter, parameter)
        for started_parameter, parameter in zip(
            started_model.parameters(), model.parameters(), strict=True
        )
    )


def test_seeds_decide_the_weights():
    first, second = (
        build_state(tiny_plan(train={"seed": seed})).model_and_optimizer.model.lm_head.weight
        for seed in (0, 1)
    )
    assert not torch.equal(first, second)


def test_the_best_is_the_lowest_finite_loss():
    progress = RunProgress()
    is_best = []
    for step, loss in enumerate((3.0, float("nan"), 2.0, 2.0, 2.5), start=1):
        progress.step = step
        is_best.append(progress.note_evaluation(loss))
    assert is_best == [True, False, True, False, False], "the first of equals"
    assert (progress.best_step, progress.best_loss, progress.evaluations_since_best) == (3, 2.0, 2)
